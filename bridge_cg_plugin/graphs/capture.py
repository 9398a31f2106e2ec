"""Capturing a CUDA graph so that a failure leaves the process usable."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .errors import CaptureError, OutOfMemoryInCapture, first_line


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
    guards = [_GeneratorGuard(g, device) for g in (torch.cuda.default_generators[device.index], *generators)]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                _abandon(graph, pool, device)
                raise
            graph.capture_end()
    except torch.OutOfMemoryError as error:
        _restore(guards)
        raise OutOfMemoryInCapture(first_line(error)) from error
    except BaseException as error:
        _end_pool(pool, device)
        _restore(guards)
        if not isinstance(error, Exception):
            raise
        raise CaptureError(f"{type(error).__name__}: {error}") from error
    finally:
        if collecting:
            gc.enable()
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


def _restore(guards: Sequence["_GeneratorGuard"]) -> None:
    for guard in guards:
        guard.restore()


class _GeneratorGuard:
    """Brings a generator back to life after a failed capture left it in capture mode."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._state = self._generator.get_state()
        self._device = device

    def restore(self) -> None:
        fresh = torch.Generator(device=self._device)
        fresh.set_state(self._state)
        self._generator.graphsafe_set_state(fresh.graphsafe_get_state())
