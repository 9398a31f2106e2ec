"""Measured costs of a region: its own time, and that of copies between device and host."""

import time
from collections.abc import Callable, Sequence

import torch

from ..graphs.errors import OutOfMemoryInCapture
from ..graphs.recordings.executor import Executor
from ..graphs.recordings.recording import RegionBody
from .host_memory import PinnedMemory
from .observe import Observed, synchronize
from .planner import Costs

# Copies as large as activations are, one after the other.
PROBE_BYTES = 1 << 24
PROBES = 8
REPEATS = 3

_rates: dict[torch.device, tuple[float, float]] = {}


def measured_costs(executor: Executor, bodies: Sequence[RegionBody], observed: Observed) -> Costs:
    """Time a region, or the parts of a chain, with all activations kept, as recordings that are dropped again.

    Parts that save the same are timed once. Where the device has too little memory for a recording, passes outside a
    graph are timed. They take longer where launches count, so that a plan may offload more than is best. Nothing waits
    for other ranks: each decides by itself.
    """
    offload_gbps, load_gbps = copy_rates(executor.device)
    kinds = [part.seen for part in observed.inventory.each]
    times = {kind: _times_of(executor, body) for kind, body in dict(zip(kinds, bodies, strict=True)).items()}
    forward_ms, backward_ms = map(sum, zip(*map(times.__getitem__, kinds), strict=True))
    return Costs(forward_ms, backward_ms, offload_gbps, load_gbps, observed.rebuild_ms)


def _times_of(executor: Executor, body: RegionBody) -> tuple[float, float]:
    """Return the times of one body's forward and backward, in ms."""
    with executor.isolated():
        try:
            recording = executor.record(body, executor.new_memory().begin())
            times = _times(executor.device, recording.forward, recording.backward)
            del recording
        except OutOfMemoryInCapture:
            times = _times(executor.device, body.forward, body.backward)
    body.forget()
    if executor.device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def _times(device: torch.device, forward: Callable[[], object], backward: Callable[[], object]) -> tuple[float, float]:
    """Return the shortest times of forward and backward, in ms."""
    found = []
    for _ in range(REPEATS):
        marks = [_mark(device)]
        for run in (forward, backward):
            run()
            marks.append(_mark(device))
        found.append((marks[1] - marks[0], marks[2] - marks[1]))
    return min(f for f, _ in found), min(b for _, b in found)


def _mark(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter() * 1e3


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Return the rates of copies to and from page-locked memory in 10^9 bytes a second, measured once a process."""
    if device not in _rates:
        memory = PinnedMemory(page_locked=device.type == "cuda")
        host = memory.reserve(0, {0: PROBE_BYTES})[0]
        on_device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        offload = _rate(device, lambda: host.copy_(on_device, non_blocking=True))
        load = _rate(device, lambda: on_device.copy_(host, non_blocking=True))
        _rates[device] = offload, load
        del host, on_device
        memory.release()
    return _rates[device]


def _rate(device: torch.device, copy: Callable[[], object]) -> float:
    copy()
    times = []
    for _ in range(REPEATS):
        began = _mark(device)
        for _ in range(PROBES):
            copy()
        times.append(_mark(device) - began)
    return PROBES * PROBE_BYTES / min(times) / 1e6
