"""Capturing a CUDA graph so that a failure leaves the process usable; inside of what no capture or replay may be."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..errors import CaptureError, OutOfMemoryInCapture, first_line


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


# Random states: recordings draw numbers that no training step asked for.


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that work on a device draws from where it names none."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def put_back(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Let generators be afterwards where they were before, whatever was drawn inside and whether or not that failed."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


class CapturedStates:
    """The states of generators that a capture draws from, made before it begins.

    A capture that fails may leave them in capture mode, in which nothing can be drawn outside of a capture. Graphs that
    were captured earlier are tied to the same states, and so are other generators that share them, as the trackers of
    random states make them. So the states stay, and are led out of capture mode.

    Args:
        generators: The generators.
        stream: Of captures.
    """

    def __init__(self, generators: Sequence[torch.Generator], stream: torch.cuda.Stream) -> None:
        self._states = [(each, each.graphsafe_get_state(), each.get_state()) for each in generators]
        self._stream = stream
        self._written = torch.zeros(1, device=stream.device)  # later there may be no memory

    def recover(self) -> None:
        """Let every generator draw again, from its own state and from where it was."""
        for generator, state, _ in self._states:
            generator.graphsafe_set_state(state)
        try:
            self._capture_nothing()
        except Exception:
            self._replace()
        for generator, _, values in self._states:
            generator.set_state(values)

    def _capture_nothing(self) -> None:
        """Capture one write: PyTorch ends the capture mode of states only where a capture succeeds."""
        graph = torch.cuda.CUDAGraph()
        for _, state, _ in self._states:
            graph.register_generator_state(state)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._written.zero_()  # PyTorch warns of an empty graph
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self._stream.device)

    def _replace(self) -> None:
        """Give generators new states: what runs eager can draw, earlier graphs cannot."""
        for generator, _, _ in self._states:
            generator.graphsafe_set_state(torch.Generator(device=self._stream.device).graphsafe_get_state())


# Returns the hooks on tensors that autograd saves, None without any.
_hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
# Names that the hooks of a non-reentrant checkpoint on saved tensors begin with; other packages copy PyTorch's.
CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint counts what autograd saves: its second forward has to save as much."""
    hooks: Sequence[Any] | None = _hooks_on_saved_tensors(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(CHECKPOINT_HOOKS)
