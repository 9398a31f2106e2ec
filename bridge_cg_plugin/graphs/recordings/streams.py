"""Streams of a recording: weight gradients concurrently with the main stream, and where graphs replay that copy.

Microbatches of few tokens leave most of a GPU idle. Nothing in a backward reads the weight gradients, so kernels that
compute them are passed to `run_on_side_stream`. In a recording without a side stream it runs them in place.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

# The main stream waits for side work in groups of this size: about as many as two layers of an encoder submit.
GROUP_SIZE = 8


class SideStream:
    """The side stream of one recording, forked from the main stream and joined to it by events.

    The allocator may reuse a dropped tensor at once for its own stream. So inputs of side work are kept until the main
    stream has waited for it, which it does after every `GROUP_SIZE` pieces of work for the `GROUP_SIZE` before.
    (`record_stream` would keep them until the capture ends.) Results of side work are in the side stream's memory.

    Args:
        stream: Where work runs; None runs it at once, for the reference executor.

    Attributes:
        runs_now: Whether side work is being submitted right now.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream: torch.cuda.Stream | None = stream
        self._main: torch.cuda.Stream | None = stream
        self._uses: Counter[int] = Counter()
        self._reads: list[tuple[Tensor, ...]] = []
        self._before: tuple[torch.cuda.Event | None, list[tuple[Tensor, ...]]] = (None, [])
        self.runs_now = self._forked = False

    def forget(self) -> None:
        """Drop what a forward left for its backward."""
        self._uses.clear()

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
            self._join()
        except BaseException:
            with suppress(Exception):  # a capture cannot end while a stream is not joined; the first error counts
                self._join()
            raise
        finally:
            _current = before
            self._reads, self._before = [], (None, [])

    def run[T](self, work: Callable[[], T], *reads: Tensor) -> T:
        """Run work after what the main stream was given so far; only side work may read its result inside `active`.

        Args:
            work: Submits kernels.
            reads: Every tensor of the main stream that it reads or writes and that might be dropped meanwhile.
        """
        if self.runs_now:
            return work()
        self.runs_now = True
        try:
            with self._fork():
                made = work()
        finally:
            self.runs_now = False
        self._reads.append(reads)
        if len(self._reads) == GROUP_SIZE:
            self._wait_for_previous_group()
        return made

    def _join(self) -> None:
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


class ReplayStream:
    """Where graphs replay that copy activations, and when the main stream, the one that is current then, may go on.

    The way to another stream and back costs every replay a record and two waits, on the host and on the device. Graphs
    without copies have no use for it: they replay on the main stream, which waits once for earlier copies.

    Args:
        cuda_graph_stream: A stream of its own for replays of graphs that copy; None is the main stream, and nothing is
            waited for.
        cuda_graph_event: An external one, `torch.cuda.Event(external=True)`, recorded inside every such graph once its
            results are there: the main stream goes on from it while the graph still copies. Without it the main
            stream waits for the end of the graph.

    Raises:
        ValueError: An event without a stream of its own.
    """

    def __init__(
        self, cuda_graph_stream: torch.cuda.Stream | None = None, cuda_graph_event: torch.cuda.Event | None = None
    ) -> None:
        if cuda_graph_event is not None and cuda_graph_stream is None:
            raise ValueError(
                "cuda_graph_event: it must be None without cuda_graph_stream; give replays a stream of their own, or "
                "leave the event out: on the main stream there is nothing to come back from"
            )
        self.stream, self.event = cuda_graph_stream, cuda_graph_event
        # Streams that wait for the end of the last replay beside the main stream; None where there was none.
        self._waiting: set[torch.cuda.Stream] | None = None

    def record_event(self, stream: torch.cuda.Stream) -> None:
        """Record the event into the capture under way on `stream`."""
        if self.event is not None:
            self.event.record(stream)

    def launch(self, replay: Callable[[], None], copies: bool) -> None:
        """Replay behind what the main stream was given so far, and before what it is given next.

        Args:
            replay: Launches a graph on the current stream.
            copies: Whether the graph copies activations to the host or back.
        """
        if self.stream is None:
            replay()
        elif copies:
            self._launch_aside(self.stream, replay)
        else:
            if self._waiting is not None:
                main = torch.cuda.current_stream(self.stream.device)
                if main not in self._waiting:  # for copies of earlier graphs, whose memory the next one may use
                    main.wait_stream(self.stream)
                    self._waiting.add(main)
            replay()

    def _launch_aside(self, stream: torch.cuda.Stream, replay: Callable[[], None]) -> None:
        main = torch.cuda.current_stream(stream.device)
        self._waiting = {stream}
        if main == stream:
            replay()
            return
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            replay()
        if self.event is not None:
            main.wait_event(self.event)
        else:
            main.wait_stream(stream)
            self._waiting.add(main)
