"""Errors raised by the graph engine, and when what failed is tried again. Imports no torch."""

import traceback

from .fallback import Fallback


class GraphError(RuntimeError):
    """Base of the engine's errors."""


class CaptureError(GraphError):
    """A graph could not be captured. The process can go on without it; `__cause__` holds the first error."""


class OutOfMemoryInCapture(CaptureError):
    """The device had too little memory left for a graph's activations."""


class Refused(CaptureError):
    """The model computes something that a replay would not.

    Args:
        reason: What microbatches that run eager are counted under.
        what: What was found, and where.
    """

    def __init__(self, reason: Fallback, what: str) -> None:
        super().__init__(f"{what}; {reason.remedy}")
        self.reason = reason


class OtherRankFailed(CaptureError):
    """Another rank of the group could not capture; the message names it and its reason."""


class ProofError(GraphError):
    """Replays of a recording differ from eager, and the user asked for a strict run."""


class Overflow(GraphError):
    """A microbatch had too little room in its graph: what its forward left is of no use, and it is to run eager."""


class ReplayError(GraphError):
    """A replay was asked for in a way that cannot give right results: a backward twice, or after the model changed."""


def reason_of(error: BaseException) -> Fallback:
    """Return what microbatches are counted under that run eager because a capture raised an error."""
    return error.reason if isinstance(error, Refused) else Fallback.CAPTURE_FAILED


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, empty without one."""
    return (str(error).splitlines() or [""])[0]


def named(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def release_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, tensors among it, now and not at a later garbage collection."""
    found: BaseException | None = error
    seen: set[int] = set()  # errors may name each other as their cause
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


class Retry:
    """Waits before one more try for turns whose number doubles with each failure, so that N turns see log2(N) tries.

    Ranks that count the same turns and fail together try together.

    Args:
        turns: To wait after the first failure.

    Attributes:
        reason: Of the last failure.
    """

    def __init__(self, turns: int) -> None:
        self._wait, self._left, self.reason = turns, 0, Fallback.CAPTURE_FAILED

    @property
    def due(self) -> bool:
        """Whether to try: nothing failed yet, or long enough ago."""
        return self._left <= 0

    def failed(self, reason: Fallback = Fallback.CAPTURE_FAILED) -> None:
        """Note a failure; of several before the next try, the first counts."""
        if self.due:
            self._left, self._wait, self.reason = self._wait, 2 * self._wait, reason

    def turn(self) -> None:
        """Count a turn."""
        self._left -= 1
