"""Times of a function on the GPU and on the host, the kernels that it runs, and device memory."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

Run = Callable[..., object]
# Start and end in microseconds, and the name of a kernel or copy.
Span = tuple[float, float, str]
GIB = 2**30


def on_gpu() -> bool:
    """Whether there is a GPU; without one only the reference executor runs, for tests."""
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if on_gpu():
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in ms.

    Attributes:
        ms: From the first launch to the end of the last kernel.
        fwd_ms: The same until the forward's last kernel.
        host_ms: Until the function returned, without waiting for the GPU.
        repeats: How many runs were timed.
    """

    ms: float
    fwd_ms: float
    host_ms: float
    repeats: int


def median_times(run: Run, repeats: int, warmup: int = 3, seconds: float = float("inf")) -> Times:
    """Time `run(between)`, which calls `between()` once its forward is submitted.

    Args:
        run: What is timed.
        repeats: Timed runs, at least 3.
        warmup: Untimed runs before.
        seconds: No further run begins after this long, but 3 are always timed.
    """
    began = time.perf_counter()
    for _ in range(warmup):
        run(lambda: None)
    synchronize()
    found: list[tuple[float, float, float]] = []
    while len(found) < max(repeats, 3) and (len(found) < 3 or time.perf_counter() - began < seconds):
        found.append(_time_once(run))
    total, forward, host = (sorted(values)[len(found) // 2] for values in zip(*found, strict=True))
    return Times(total, forward, host, len(found))


def _time_once(run: Run) -> tuple[float, float, float]:
    marks: list[Callable[[], float]] = []

    def mark() -> None:
        if first is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(partial(first.elapsed_time, event))
        else:
            now = time.perf_counter()
            marks.append(lambda: (now - began) * 1e3)

    synchronize()
    first = torch.cuda.Event(enable_timing=True) if on_gpu() else None
    began = time.perf_counter()
    if first is not None:
        first.record()
    run(mark)
    mark()
    host = (time.perf_counter() - began) * 1e3
    synchronize()
    forward, total = (read() for read in marks)
    return total, forward, host


@dataclass(slots=True)
class Kernels:
    """What the GPU did in one run.

    Attributes:
        busy_ms: Time in which at least one kernel or copy ran.
        count: Kernels and copies.
        by_name: Name -> (ms, count).
    """

    busy_ms: float = 0.0
    count: int = 0
    by_name: dict[str, tuple[float, int]] = field(default_factory=dict)


def profile(run: Callable[[], object]) -> Kernels:
    """Run once under PyTorch's profiler and return its kernels; none without a GPU."""
    return kernels_of(spans(run))


def spans(run: Callable[[], object]) -> list[Span]:
    """Run once under PyTorch's profiler; returns start and end in microseconds and the name of all that the GPU did."""
    if not on_gpu():
        run()
        return []
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    profiler = torch_profile(activities=[ProfilerActivity.CUDA])
    profiler.prepare_trace()
    synchronize()
    profiler.start_trace()
    run()
    synchronize()
    profiler.stop_trace()
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def kernels_of(spans: list[Span]) -> Kernels:
    """Add up (start, end, name) in microseconds; kernels that overlap are busy once."""
    found, end = Kernels(count=len(spans)), float("-inf")
    for start, stop, name in sorted(spans):
        found.busy_ms += max(stop - max(start, end), 0.0) / 1e3
        end = max(end, stop)
        ms, count = found.by_name.get(name, (0.0, 0))
        found.by_name[name] = (ms + (stop - start) / 1e3, count + 1)
    return found


class PeakMemory:
    """Device memory that is taken at the peak from here on, 0 without a GPU."""

    def __init__(self) -> None:
        synchronize()
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def read(self) -> float:
        """Return it in GiB."""
        return (torch.cuda.max_memory_allocated() - self._before) / GIB if on_gpu() else 0.0


def collect() -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()
