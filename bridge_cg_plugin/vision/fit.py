"""Which images a bucket takes: what the runtime and the planner ask. Imports no torch."""

from typing import NamedTuple

from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket


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
