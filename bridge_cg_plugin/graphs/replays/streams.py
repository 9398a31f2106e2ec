"""The stream that recordings are replayed on, and the way back to the main stream."""

from collections.abc import Callable

import torch


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
                self._wait_for_copies(self.stream, self._waiting)
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

    @staticmethod
    def _wait_for_copies(stream: torch.cuda.Stream, waiting: set[torch.cuda.Stream]) -> None:
        """Let the main stream wait for the copies of earlier graphs, whose memory the next one may use."""
        main = torch.cuda.current_stream(stream.device)
        if main not in waiting:
            main.wait_stream(stream)
            waiting.add(main)
