"""Which images a bucket takes: what the runtime and the planner ask. Imports no torch."""

from ..graphs.buckets import Bucket
from ..graphs.fallback import Fallback


def refuse_images(tokens: int, frames: int, largest: int, exact_below: int, bucket: Bucket) -> Fallback | None:
    """Return why a microbatch may not use a bucket that has room for its tokens, or None if it may.

    Args:
        tokens: Patches.
        frames: Images and video frames.
        largest: Patches of the largest frame.
        exact_below: Microbatches of up to this many patches must fill a bucket exactly.
        bucket: Has the limits (frames, patches of the largest frame).
    """
    most, bound = bucket.limits
    if tokens <= exact_below and tokens != bucket.tokens:
        return Fallback.TOO_FEW_TOKENS
    if frames > most:
        return Fallback.TOO_MANY_FRAMES
    return Fallback.FRAME_TOO_LARGE if largest > bound else None
