"""The stream that recordings are replayed on, and the way back to the main stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReplayStream:
    """Where a replay runs and when the main stream, the one that is current then, may go on.

    Args:
        cuda_graph_stream: A stream of its own for replays; None is the main stream, and nothing is waited for.
        cuda_graph_event: An external one, `torch.cuda.Event(external=True)`, recorded inside every graph once its
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

    def record_event(self, stream: torch.cuda.Stream) -> None:
        """Record the event into the capture under way on `stream`."""
        if self.event is not None:
            self.event.record(stream)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay inside: behind what the main stream was given so far, and before what it is given next."""
        if self.stream is None or self.stream == torch.cuda.current_stream(self.stream.device):
            yield
            return
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        if self.event is not None:
            main.wait_event(self.event)
        else:
            main.wait_stream(self.stream)
