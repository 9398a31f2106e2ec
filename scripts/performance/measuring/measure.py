"""Times of a function on the GPU and on the host, and the kernels that it runs."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

Run = Callable[..., object]
# Start and end in microseconds, and the name of a kernel or copy.
Span = tuple[float, float, str]

# What a kernel's name says it is part of; the first that matches.
FAMILIES = (
    ("communication", r"nccl"),
    ("copies", r"memcpy|memset|direct_copy|_copy_|CatArrayBatched|fill"),
    ("attention: dot_do_o", r"dot_do_o|dot_dO_O"),
    ("attention", r"sdpa|flash|fmha|attention|attn"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|splitK|matmul|_mm_"),
    ("norms", r"layer_?norm|ln_fwd|ln_bwd|rmsnorm|norm_fwd|norm_bwd|transformer_engine::normalization"),
    ("rotary embedding", r"_rotate|rotary|rope"),
    ("bias and activation", r"_bias_|gelu|bias_gelu"),
    ("gradient accumulation", r"multi_tensor|foreach"),
    ("reductions", r"reduce|_add_partials|_column_partials|sum"),
    ("element-wise", r"elementwise|vectorized|index|gather|scatter|triton"),
)


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


def host_in_a_row(run: Callable[[], object], count: int = 3, repeats: int = 15) -> float:
    """Return the host's ms for one of `count` runs that follow one another without waiting for the GPU, a median.

    With more of them the GPU's queue of launches fills, and the host waits for the GPU after all.
    """
    found = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - began) * 1e3 / count)
    synchronize()
    return sorted(found)[repeats // 2]


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

    def families(self) -> dict[str, float]:
        """Return the ms of each family of kernels, largest first."""
        found: dict[str, float] = {}
        for name, (ms, _) in self.by_name.items():
            key = family(name)
            found[key] = found.get(key, 0.0) + ms
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def largest(self, count: int) -> list[tuple[str, float, int]]:
        """Return (name, ms, count) of the kernels that take longest."""
        ordered = sorted(self.by_name.items(), key=lambda item: -item[1][0])
        return [(name, ms, calls) for name, (ms, calls) in ordered[:count]]


def family(name: str) -> str:
    """Return what a kernel is part of, by its name."""
    return next((key for key, pattern in FAMILIES if re.search(pattern, name, re.IGNORECASE)), "other")


def profile(run: Callable[[], object]) -> Kernels:
    """Run once under PyTorch's profiler and return its kernels; none without a GPU."""
    return kernels_of(spans(run))


def spans(run: Callable[[], object]) -> list[Span]:
    """Run once under PyTorch's profiler; returns start and end in microseconds and the name of all that the GPU did."""
    if not on_gpu():
        run()
        return []
    profile = Profile()
    profile.prepare()
    profile.start()
    run()
    return profile.stop()


class Profile:
    """PyTorch's profiler of what a GPU does between two points, with the device idle at both."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as torch_profile

        self._profiler = torch_profile(activities=[ProfilerActivity.CUDA])

    def prepare(self) -> None:
        """Prepare to begin, which takes seconds in which the GPU rests: it runs at higher clocks right after."""
        self._profiler.prepare_trace()

    def start(self) -> None:
        """Begin, after `prepare`."""
        synchronize()
        self._profiler.start_trace()

    def stop(self) -> list[Span]:
        """End; returns what `spans` does."""
        from torch.autograd import DeviceType

        synchronize()
        self._profiler.stop_trace()
        return [
            (event.time_range.start, event.time_range.end, event.name)
            for event in self._profiler.events()
            if event.device_type == DeviceType.CUDA
        ]


def overlap_us(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return how long, in the unit given, one of `some` spans ran while one of `others` did."""
    busy = merged(others)
    return sum(max(min(end, e) - max(start, s), 0.0) for start, end in merged(some) for s, e in busy)


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans as the stretches of time in which at least one of them runs."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def kernels_of(spans: list[Span]) -> Kernels:
    """Add up (start, end, name) in microseconds; kernels that overlap are busy once."""
    found, end = Kernels(count=len(spans)), float("-inf")
    for start, stop, name in sorted(spans):
        found.busy_ms += max(stop - max(start, end), 0.0) / 1e3
        end = max(end, stop)
        ms, count = found.by_name.get(name, (0.0, 0))
        found.by_name[name] = (ms + (stop - start) / 1e3, count + 1)
    return found
