"""Which images a bucket takes: what the runtime and the planner ask. Imports no torch."""

from typing import NamedTuple, Protocol

from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket


class Sized(Protocol):
    """A microbatch, with its size on the host; see `EncoderBatch`."""

    @property
    def tokens(self) -> int:
        """Patches."""

    @property
    def shape(self) -> "Shape":
        """How large it is."""


class Shape(NamedTuple):
    """A microbatch's size. Buckets refuse a shape as they refuse the microbatch.

    Attributes:
        tokens: Patches.
        frames: Images and video frames: attention segments.
        largest_frame: Patches of the largest frame.
    """

    tokens: int
    frames: int
    largest_frame: int

    @property
    def shape(self) -> "Shape":
        """Itself."""
        return self

    def covers(self, other: "Shape") -> bool:
        """Whether nothing here is smaller, so that eager takes at least as long."""
        bigger = self.tokens >= other.tokens and self.frames >= other.frames
        return bigger and self.largest_frame >= other.largest_frame


def refuse_images(shape: Shape, exact_below: int, bucket: Bucket) -> Fallback | None:
    """Return why a microbatch may not use a bucket that has room for its tokens, or None if it may.

    Args:
        shape: Of its images and video frames.
        exact_below: Microbatches of up to this many patches must fill a bucket exactly.
        bucket: Has the limits (frames, patches of the largest frame).
    """
    tokens, frames, largest = shape
    most, bound = bucket.limits
    if tokens <= exact_below and tokens != bucket.tokens:
        return Fallback.TOO_FEW_TOKENS
    if frames > most:
        return Fallback.TOO_MANY_FRAMES
    return Fallback.FRAME_TOO_LARGE if largest > bound else None
