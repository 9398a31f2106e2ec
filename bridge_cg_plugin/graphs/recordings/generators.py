"""Random states around recordings, which draw numbers that no training step asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
