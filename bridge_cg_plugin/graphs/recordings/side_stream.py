"""Work of a recording that runs on a side stream, concurrently with the main stream.

Microbatches of few tokens leave most of a GPU idle. Work whose result the main stream does not read soon, above all
weight gradients, can run concurrently: pass it to `run_on_side_stream`, `start_on_side_stream` or
`output_on_side_stream`. In a recording without a side stream they run it in place.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Where a backward begins: an output, or its place in the autograd graph where the output's memory is not kept.
Root = Tensor | GradientEdge
# The main stream waits for side work in groups of this size: about as many as two layers of an encoder submit.
GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class SideResult[T]:
    """The result of work on the side stream.

    Attributes:
        value: Only side work may read it before `wait`.
        wait: Makes the main stream wait for the work.
    """

    value: T
    wait: Callable[[], None] = lambda: None

    def result(self) -> T:
        """Return the value, for the main stream to read."""
        self.wait()
        return self.value


class SideOutput:
    """An output of the region that is computed on the side stream, detached from the main stream's autograd graph.

    Args:
        start: The input of its computation, a leaf.
        end: The output.
    """

    def __init__(self, start: Tensor, end: Tensor) -> None:
        self.start, self.end = start, end
        self.gradients: SideResult[tuple[Tensor | None, ...]] | None = None

    def add_gradient(self, of_others: Tensor) -> Tensor:
        """Return the input's whole gradient, given the gradient from all its other uses."""
        gradients, self.gradients = self.gradients, None
        of_start = None if gradients is None else gradients.result()[0]
        return of_others if of_start is None else of_others + of_start


class SideStream:
    """The side stream of one recording, forked from the main stream and joined to it by events.

    The allocator may reuse a dropped tensor at once for its own stream. So inputs of side work are kept until the main
    stream has waited for it, which it does after every `GROUP_SIZE` pieces of work for the `GROUP_SIZE` before.
    (`record_stream` would keep them until the capture ends.) Results of side work are in the side stream's memory.

    Args:
        stream: Where work runs; None runs it at once, for the reference executor.

    Attributes:
        links: The nodes at which graphs of side outputs end, each with where the main stream's graph goes on. A side
            output must not hold the latter, whose hook holds it: their memory would wait for a garbage collection.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream: torch.cuda.Stream | None = stream
        self._main: torch.cuda.Stream | None = stream
        self._uses: Counter[int] = Counter()
        self._reads: list[tuple[Tensor, ...]] = []
        self._before: tuple[torch.cuda.Event | None, list[tuple[Tensor, ...]]] = (None, [])
        self._inside = self._forked = self._side_outputs = False
        self._outputs: list[SideOutput] = []
        self.links: dict[Node, Node] = {}

    @property
    def runs_now(self) -> bool:
        """Whether side work is being submitted right now."""
        return self._inside

    @property
    def held(self) -> int:
        """Pieces of work whose inputs are kept."""
        return len(self._reads) + len(self._before[1])

    def begin(self, side_outputs: bool = True) -> None:
        """Begin a forward.

        Args:
            side_outputs: Whether `output` may use the side stream. Tensors that autograd saves must then stay in place.
        """
        self._side_outputs = side_outputs
        self.forget()

    def forget(self) -> None:
        """Drop what a forward left for its backward."""
        self._uses.clear()
        self._outputs, self.links = [], {}

    def note_use(self, parameter: Tensor) -> None:
        """Count a use of a parameter in the forward."""
        self._uses[parameter.data_ptr()] += 1

    def used_once(self, parameter: Tensor) -> bool:
        """Whether the forward used a parameter once, so that autograd adds nothing to its gradient."""
        return self._uses[parameter.data_ptr()] == 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the current side stream inside; the main stream, current now, waits for it at the end."""
        global _current
        before, _current = _current, self
        if self._stream is not None:
            self._main = torch.cuda.current_stream(self._stream.device)
        try:
            yield
            self.join()
        except BaseException:
            with suppress(Exception):  # a capture cannot end while a stream is not joined; the first error counts
                self.join()
            raise
        finally:
            _current = before
            self._reads, self._before = [], (None, [])

    def run[T](self, work: Callable[[], T], *reads: Tensor) -> T:
        """Run work after what the main stream was given so far; only side work may read its result before `join`.

        Args:
            work: Submits kernels.
            reads: Every tensor of the main stream that it reads or writes and that might be dropped meanwhile.
        """
        if self._inside:
            return work()
        self._inside = True
        try:
            with self._fork():
                made = work()
        finally:
            self._inside = False
        self._reads.append(reads)
        if len(self._reads) == GROUP_SIZE:
            self._wait_for_previous_group()
        return made

    def start[T](self, work: Callable[[], T], *reads: Tensor) -> "SideResult[T]":
        """Run work as `run` does, and let the main stream wait for its result."""
        if self._inside:
            return SideResult(work())
        value, done = self.run(work, *reads), self._record_event()
        return SideResult(value, lambda: self._wait_event(done))

    def output(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute an output of the region from x on the side stream, where its backward runs as well."""
        if not self._side_outputs:
            return work(x)
        if not torch.is_grad_enabled():
            return self.run(lambda: work(x), x)
        start = x.detach().requires_grad_(x.requires_grad)
        output = SideOutput(start, self.run(lambda: work(start), start))
        if output.end.requires_grad:
            self._outputs.append(output)
        if x.requires_grad:
            self.links[get_gradient_edge(start).node] = get_gradient_edge(x).node
            x.register_hook(output.add_gradient)
        return output.end

    def differentiate(
        self, pairs: Sequence[tuple[Root, Tensor]], targets: Sequence[Tensor]
    ) -> tuple[list[tuple[Root, Tensor]], list[tuple[Tensor | None, ...]]]:
        """Submit the backward of side outputs before that of all others.

        Args:
            pairs: Outputs themselves, with their gradients.
            targets: Tensors whose gradients are computed.

        Returns:
            The remaining pairs, and the targets' gradients through each side output, which are valid after `join`.

        Raises:
            RuntimeError: A side output is not an output of the region.
        """
        side_outputs, self._outputs, self.links = self._outputs, [], {}
        left, found = list(pairs), []
        for side_output in reversed(side_outputs):
            place = next((i for i, (output, _) in enumerate(left) if output is side_output.end), None)
            if place is None:
                raise RuntimeError("a side stream's result was changed before it became an output of the region")
            _, gradient = left.pop(place)
            found.append(self._through(side_output, gradient, targets))
        return left, found

    def _through(self, output: SideOutput, gradient: Tensor, targets: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        wanted = [output.start, *targets] if output.start.requires_grad else targets

        def differentiated() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(output.end, wanted, gradient, allow_unused=True)

        # Autograd drops what it saved, the start as well, as soon as the backward is submitted.
        if not output.start.requires_grad:
            return self.run(differentiated, gradient, output.start)
        output.gradients = self.start(differentiated, gradient, output.start)
        return output.gradients.value[1:]

    def join(self) -> None:
        """Let the main stream wait for all side work."""
        if self._forked:
            self._wait_event(self._record_event())
        self._forked = False

    def _wait_for_previous_group(self) -> None:
        done, _ = self._before
        if done is not None:
            self._wait_event(done)
        self._before = self._record_event(), self._reads
        self._reads = []

    def _fork(self) -> AbstractContextManager[None]:
        if self._stream is None or self._main is None:
            return nullcontext()
        self._stream.wait_stream(self._main)
        self._forked = True
        return torch.cuda.stream(self._stream)

    def _record_event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait_event(self, done: torch.cuda.Event | None) -> None:
        if done is not None and self._main is not None:
            self._main.wait_event(done)


# Set while work is recorded. Autograd calls a backward in a thread of its own, so a context variable would not do.
_current: SideStream | None = None


def current_side_stream() -> SideStream | None:
    """Return the side stream of the work that is being recorded; None where everything runs on one stream."""
    return _current


def run_on_side_stream[T](work: Callable[[], T], *reads: Tensor) -> T:
    """Run work whose result only side work reads before the recording ends; see `SideStream.run`."""
    return work() if _current is None else _current.run(work, *reads)


def start_on_side_stream[T](work: Callable[[], T], *reads: Tensor) -> SideResult[T]:
    """Run work whose result the main stream reads later; see `SideStream.start`."""
    return SideResult(work()) if _current is None else _current.start(work, *reads)


def output_on_side_stream(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `work(x)`, an output of the region that nothing else in it reads; see `SideStream.output`."""
    return work(x) if _current is None else _current.output(work, x)
