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


# By the index of a GPU, generators whose numbers nobody uses: for work that asks for a random state and draws nothing.
_aside: dict[int, torch.Generator] = {}


def provide_aside(device: torch.device) -> None:
    """Let `drawing_aside` work on a GPU, in graphs that are captured from now on."""
    if device.type == "cuda" and not generators_aside(device):
        _aside[device.index] = default_generator(device).clone_state()


def generators_aside(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return what captures may draw from inside `drawing_aside`."""
    return (_aside[device.index],) if device.type == "cuda" and device.index in _aside else ()


@contextmanager
def drawing_aside(device: torch.device) -> Iterator[None]:
    """Leave the default generator where it is, whatever is drawn inside; without effect where nobody provided for it.

    What is drawn inside is the same again and again: nobody may use it.
    """
    aside = generators_aside(device)
    if not aside:
        yield
        return
    default = default_generator(device)
    kept = default.graphsafe_get_state()
    default.graphsafe_set_state(aside[0])
    try:
        yield
    finally:
        default.graphsafe_set_state(kept)


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
