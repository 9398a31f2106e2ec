"""Work of a recording that the main stream need not wait for, on a stream beside it.

Few tokens leave most of a GPU idle, and a recording is one chain of kernels. What nothing further down the chain reads,
gradients of weights above all, may run beside it: `beside` and `ahead` say so where the work is done. On a recording
without a side stream both run it at once, in its place.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

# Pieces of work after which the main stream waits for those before them: two layers of an encoder make about as many.
TOGETHER = 8


class SideWork:
    """The side stream of one recording, forked from the main stream and joined to it by events.

    What is dropped on the host the allocator may hand out again at once, to work of the stream that it was made on. So
    what side work reads is kept until the main stream has waited for that work: at every `TOGETHER` pieces it waits for
    those before the last as many. In a capture `record_stream` would keep it until the end. What side work returns lies
    in the side stream's memory, handed out again to side work alone, which begins behind all that the main stream got.

    Args:
        stream: Where work runs; None runs it at once, for the reference executor.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = self._main = stream
        self._uses: Counter[int] = Counter()
        self._reads: list[tuple[Tensor, ...]] = []
        self._before: tuple[torch.cuda.Event | None, list[tuple[Tensor, ...]]] = (None, [])
        self._inside = self._forked = False

    @property
    def runs_now(self) -> bool:
        """Whether side work is being submitted right now."""
        return self._inside

    @property
    def held(self) -> int:
        """Pieces of work whose inputs are kept."""
        return len(self._reads) + len(self._before[1])

    def begin(self) -> None:
        """Begin a forward: no tensor was used yet."""
        self._uses.clear()

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

    def start[T](self, work: Callable[[], T], *reads: Tensor) -> Callable[[], T]:
        """Run work as `run` does; what comes back returns its result and lets the main stream wait for it."""
        if self._inside:
            return _given(work())
        made, done = self.run(work, *reads), self._mark()

        def result() -> T:
            self._wait(done)
            return made

        return result

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
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(self._main)
        self._forked = True
        return torch.cuda.stream(self._stream)

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None:
            self._main.wait_event(done)


# Set while work is recorded. Autograd calls a backward in a thread of its own, so a context variable would not do.
_current: SideWork | None = None


def current_side_work() -> SideWork | None:
    """Return the side stream of the work that is recorded now; None where everything runs on one stream."""
    return _current


def beside[T](work: Callable[[], T], *reads: Tensor) -> T:
    """Run work whose result only other side work reads before the recording's end; see `SideWork.run`."""
    return work() if _current is None else _current.run(work, *reads)


def ahead[T](work: Callable[[], T], *reads: Tensor) -> Callable[[], T]:
    """Run work whose result is asked for later, by calling what comes back; see `SideWork.start`."""
    return _given(work()) if _current is None else _current.start(work, *reads)


def _given[T](made: T) -> Callable[[], T]:
    return lambda: made
