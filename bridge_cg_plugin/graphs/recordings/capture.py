"""Capturing a CUDA graph so that a failure leaves the process usable."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..errors import CaptureError, OutOfMemoryInCapture, first_line
from .generators import CapturedStates, default_generator


def is_capturing() -> bool:
    """Whether a graph is being recorded on this thread's stream: the host can read nothing there."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect no garbage inside: one collection in a training process takes up to half a second."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def capture_graph(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    stream: torch.cuda.Stream,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """Record the body's work on `stream` into `graph`, with its memory from `pool`, a handle of PyTorch's.

    The default generator and those given may be drawn from: every replay goes on where they are then.
    Only this thread's calls are checked while recording, so that data loader and NCCL watchdog threads go on.

    Raises:
        OutOfMemoryInCapture: The device ran out of memory.
        CaptureError: Anything else went wrong; the first error is its cause.
    """
    device = stream.device
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    states = CapturedStates((default_generator(device), *generators), stream)
    try:
        for generator in generators:
            graph.register_generator_state(generator)
        with collected_later(), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                _abandon(graph, pool, device)
                raise
            graph.capture_end()
    except torch.OutOfMemoryError as error:
        states.recover()
        raise OutOfMemoryInCapture(first_line(error)) from error
    except BaseException as error:
        _end_pool(pool, device)
        states.recover()
        if not isinstance(error, Exception):
            raise
        raise CaptureError(f"{type(error).__name__}: {error}") from error
    torch.cuda.current_stream(device).wait_stream(stream)


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    with suppress(Exception):
        graph.capture_end()
        graph.reset()
        return
    _end_pool(pool, device)


def _end_pool(pool: tuple[int, int], device: torch.device) -> None:
    # PyTorch leaves the allocator routed to the pool when ending the capture fails.
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(device.index, pool)
