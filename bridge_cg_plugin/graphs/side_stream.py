"""Work of a recording that the main stream need not wait for, on a stream beside it.

Few tokens leave most of a GPU idle, and a recording is one chain of kernels. What nothing further down the chain reads,
gradients of weights above all, may run beside it: `beside`, `ahead` and `branch` say so where the work is done. On a
recording without a side stream they run it at once, in its place.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

# Pieces of work after which the main stream waits for those before them: two layers of an encoder make about as many.
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Started[T]:
    """Work that runs beside the main stream, and what it made.

    Attributes:
        made: Its result, which only side work may read yet.
        wait: Lets the main stream wait for it.
    """

    made: T
    wait: Callable[[], None] = lambda: None

    def result(self) -> T:
        """Return what was made, for the main stream to read."""
        self.wait()
        return self.made


class Branch:
    """A part of a forward that leads from one tensor to an output of the region, cut off from autograd's graph.

    Args:
        start: What it begins with, a leaf.
        end: The output.
    """

    def __init__(self, start: Tensor, end: Tensor) -> None:
        self.start, self.end = start, end
        self.gradients: Started[tuple[Tensor | None, ...]] | None = None

    def add_gradient(self, of_others: Tensor) -> Tensor:
        """Return the gradient of the tensor that it begins with, from that of all else which reads the tensor."""
        gradients, self.gradients = self.gradients, None
        of_start = None if gradients is None else gradients.result()[0]
        return of_others if of_start is None else of_others + of_start


class SideStream:
    """The side stream of one recording, forked from the main stream and joined to it by events.

    The allocator may reuse a dropped tensor at once for its own stream. So inputs of side work are kept until the main
    stream has waited for it: after every `TOGETHER` pieces it waits for the `TOGETHER` before. (`record_stream` would
    keep them until the capture ends.) Results of side work are in the side stream's memory.

    Args:
        stream: Where work runs; None runs it at once, for the reference executor.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream: torch.cuda.Stream | None = stream
        self._main: torch.cuda.Stream | None = stream
        self._uses: Counter[int] = Counter()
        self._reads: list[tuple[Tensor, ...]] = []
        self._before: tuple[torch.cuda.Event | None, list[tuple[Tensor, ...]]] = (None, [])
        self._inside = self._forked = self._branching = False
        self._branches: list[Branch] = []

    @property
    def runs_now(self) -> bool:
        """Whether side work is being submitted right now."""
        return self._inside

    @property
    def held(self) -> int:
        """Pieces of work whose inputs are kept."""
        return len(self._reads) + len(self._before[1])

    def begin(self, branching: bool = True) -> None:
        """Begin a forward.

        Args:
            branching: Whether outputs may be computed beside; what autograd saves for them must then stay where it is.
        """
        self._branching = branching
        self.forget()

    def forget(self) -> None:
        """Drop what a forward left for its backward."""
        self._uses.clear()
        self._branches = []

    def note_use(self, parameter: Tensor) -> None:
        """Count a use of a parameter in the forward."""
        self._uses[parameter.data_ptr()] += 1

    def used_once(self, parameter: Tensor) -> bool:
        """Whether the forward used a parameter once, so that autograd adds nothing to its gradient."""
        return self._uses[parameter.data_ptr()] == 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let `beside` and `ahead` use this stream inside; the main stream, current now, waits for it at the end."""
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
        """Run work behind what the main stream was given so far; only side work may read its result before `join`.

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
        if len(self._reads) == TOGETHER:
            self._turn()
        return made

    def start[T](self, work: Callable[[], T], *reads: Tensor) -> "Started[T]":
        """Run work as `run` does, for the main stream to ask for its result."""
        if self._inside:
            return Started(work())
        made, done = self.run(work, *reads), self._mark()
        return Started(made, lambda: self._wait(done))

    def branch(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute an output of the region from x by work of its own, which autograd differentiates beside, too."""
        if not self._branching:
            return work(x)
        if not torch.is_grad_enabled():
            return self.run(lambda: work(x), x)
        start = x.detach().requires_grad_(x.requires_grad)
        branch = Branch(start, self.run(lambda: work(start), start))
        if branch.end.requires_grad:
            self._branches.append(branch)
        if x.requires_grad:
            x.register_hook(branch.add_gradient)
        return branch.end

    def differentiate(
        self, pairs: Sequence[tuple[Tensor, Tensor]], targets: Sequence[Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor | None, ...]]]:
        """Begin a backward with the branches: nothing that comes later is needed for them.

        Args:
            pairs: Outputs with their gradients.
            targets: What gradients are wanted of.

        Returns:
            The pairs that are left, and the targets' gradients through each branch, which wait for `join`.

        Raises:
            RuntimeError: A branch does not end in an output.
        """
        branches, self._branches = self._branches, []
        left, found = list(pairs), []
        for branch in reversed(branches):
            place = next((i for i, (output, _) in enumerate(left) if output is branch.end), None)
            if place is None:
                raise RuntimeError("what a branch computed was changed before it became an output of the region")
            _, gradient = left.pop(place)
            found.append(self._through(branch, gradient, targets))
        return left, found

    def _through(self, branch: Branch, gradient: Tensor, targets: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        wanted = [branch.start, *targets] if branch.start.requires_grad else targets

        def differentiated() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(branch.end, wanted, gradient, allow_unused=True)

        # Autograd drops what it saved, the start as well, as soon as the backward is submitted.
        if not branch.start.requires_grad:
            return self.run(differentiated, gradient, branch.start)
        branch.gradients = self.start(differentiated, gradient, branch.start)
        return branch.gradients.made[1:]

    def join(self) -> None:
        """Let the main stream wait for all side work."""
        if self._forked:
            self._wait(self._mark())
        self._forked = False

    def _turn(self) -> None:
        done, _ = self._before
        if done is not None:
            self._wait(done)
        self._before = self._mark(), self._reads
        self._reads = []

    def _fork(self) -> AbstractContextManager[None]:
        if self._stream is None or self._main is None:
            return nullcontext()
        self._stream.wait_stream(self._main)
        self._forked = True
        return torch.cuda.stream(self._stream)

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None and self._main is not None:
            self._main.wait_event(done)


# Set while work is recorded. Autograd calls a backward in a thread of its own, so a context variable would not do.
_current: SideStream | None = None


def current_side_stream() -> SideStream | None:
    """Return the side stream of the work that is recorded now; None where everything runs on one stream."""
    return _current


def beside[T](work: Callable[[], T], *reads: Tensor) -> T:
    """Run work whose result only other side work reads before the recording's end; see `SideStream.run`."""
    return work() if _current is None else _current.run(work, *reads)


def ahead[T](work: Callable[[], T], *reads: Tensor) -> Started[T]:
    """Run work whose result is asked for later; see `SideStream.start`."""
    return Started(work()) if _current is None else _current.start(work, *reads)


def branch(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `work(x)`, an output of the region that nothing else in it reads; see `SideStream.branch`."""
    return work(x) if _current is None else _current.branch(work, x)
