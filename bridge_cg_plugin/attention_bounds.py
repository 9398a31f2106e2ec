"""The bounds (segments, tokens of the largest) that packed attention is recorded for, and what fits them.

Runtime and planner ask alike. Imports no torch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .graphs.buckets import GRANULARITY, Bucket, round_up
from .graphs.fallback import Fallback

# A packed attention backward in cuDNN scans segments x largest segment, each rounded up (segments to at least 32, the
# largest to a power of two), padding included: over 27 layers on an H200 it takes 4.3 ms for 32 x 4096 and 17 ms for
# 512 x 1024. So a capacity is recorded for several bounds, and a batch takes the cheapest that it fits.
COMMON_SEGMENTS = 32
SMALLEST_FRACTION = 8
# From this many tokens on a single frame has bounds of its own: cuDNN scans no other rows, Transformer Engine, which
# would scan 32 segments, attends unpacked. Below, scanning them costs less than a capture.
UNPACKED_FROM = 768
# Up to this many tokens an encoder's kernels leave so much of an H200 idle that side work pays:
# docs/benchmarks/vision_bench.jsonl.
SIDE_STREAM_UP_TO = 4096
# Below this many tokens the scan is cheap enough for one bound per frame count.
SMALL_CAPACITY = 1024
# Attention that is called directly scans segments x largest segment as they are: 30,000 rows of 16 heads in a
# millisecond of 27 layers on an H200. Each bound costs a capture and two of cuDNN's plans, so there are few: a few
# segments and many, of similar size, which scan this many rows a token, and a few of any size.
FEW_SEGMENTS, MANY_SEGMENTS, ANY_SEGMENTS = 8, 32, 16
SCANNED_ROWS = 4
# Bounds of the largest segment, in tokens, from which cuDNN's kernels beat PyTorch's packed ones on an H200.
CUDNN_FROM = 768
# Rows that are scanned in the time that one token takes, forward and backward (27 layers, an H200).
ROWS_A_TOKEN = 230
# With deterministic algorithms, cuDNN's attention backward takes 128 bytes x heads x (tokens rounded up to a power of
# two) squared of workspace, 32 GiB at 4096 tokens and 16 heads, and Transformer Engine drops the fused kernel from
# frames x heads x largest frame squared = 2**30 on. Eager meets the same walls.
DETERMINISTIC_TOKENS = 4096
DETERMINISTIC_LIMITS = ((1, 4096), (32, 1024), (64, 512))


def deterministic() -> bool:
    """Whether deterministic algorithms are asked for; Transformer Engine looks at both of its and PyTorch's switch."""
    torch = sys.modules.get("torch")
    asked = torch is not None and torch.are_deterministic_algorithms_enabled()
    return asked or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def frame_limits(tokens: int, max_frames: int) -> list[tuple[int, int]]:
    """Return the bounds (frames, tokens of the largest frame) to record a capacity for, cheapest first.

    Args:
        tokens: Capacity.
        max_frames: Most frames that any bucket takes.
    """
    if deterministic():
        return list(dict.fromkeys((min(n, max_frames), min(m, tokens)) for n, m in DETERMINISTIC_LIMITS))
    return segment_limits(tokens, max_frames, UNPACKED_FROM)


def segment_limits(tokens: int, max_segments: int, unpacked_from: int | None = None) -> list[tuple[int, int]]:
    """Return the bounds (segments, tokens of the largest segment) to record a capacity for, cheapest first.

    Args:
        tokens: Capacity.
        max_segments: Most segments that any bucket takes.
        unpacked_from: From this many tokens on a single segment attends without a scan; None is never.
    """
    sizes = {tokens}
    if tokens > SMALL_CAPACITY:
        sizes |= {1 << n for n in range(tokens.bit_length()) if tokens / SMALLEST_FRACTION <= 1 << n < tokens}
    bounds = {(min(COMMON_SEGMENTS, max_segments), size) for size in sizes}
    bounds |= {(max_segments, min(sizes)), (max_segments, tokens)}
    if unpacked_from is not None and tokens >= unpacked_from:
        bounds.add((1, tokens))
    return _cheapest_first(bounds, tokens, lambda segments, largest: scan_cost(segments, largest, unpacked_from))


def attended_limits(tokens: int, max_frames: int, directly: bool) -> list[tuple[int, ...]]:
    """Return `scanned_limits` where cuDNN is called directly, else `frame_limits`."""
    return [*(scanned_limits if directly else frame_limits)(tokens, max_frames)]


def scanned_limits(tokens: int, max_frames: int) -> list[tuple[int, int]]:
    """Return the bounds as `frame_limits`, for attention that scans exactly frames x largest frame.

    There are five at most: one frame, few and many of similar size, few of any size, and whatever else fits.
    """
    few, many, any_size = (min(n, max_frames) for n in (FEW_SEGMENTS, MANY_SEGMENTS, ANY_SEGMENTS))
    bounds = {(max_frames, tokens)}
    if tokens >= UNPACKED_FROM:
        bounds.add((1, tokens))
    if tokens <= SMALL_CAPACITY:
        bounds.add((few, tokens))
    else:
        similar = {(n, min(round_up(-(-tokens * SCANNED_ROWS // n), GRANULARITY), tokens)) for n in (few, many)}
        bounds |= {*similar, (any_size, tokens)}
    return _cheapest_first(bounds, tokens, lambda segments, largest: segments * largest)


def cudnn_pays(segments: int, largest: int, tokens: int) -> bool:
    """Whether cuDNN attends inside segments in less time than PyTorch's packed kernels, which scan no rows.

    Args:
        segments: How many there are at most.
        largest: Bound of a segment's length in tokens.
        tokens: Rows of the packed tensors.
    """
    return largest >= CUDNN_FROM and segments * largest <= ANY_SEGMENTS * tokens


def replay_cost(bucket: Bucket) -> float:
    """Return the time of a replay in tokens: those of the bucket, and what attention scans for its limits.

    Args:
        bucket: Without limits, or with (segments, tokens of the largest).
    """
    if len(bucket.limits) != 2 or (bucket.limits[0] == 1 and bucket.tokens >= UNPACKED_FROM):
        return float(bucket.tokens)
    segments, largest = bucket.limits
    return bucket.tokens + segments * largest / ROWS_A_TOKEN


def _cheapest_first(
    bounds: Iterable[tuple[int, int]], tokens: int, cost: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Return the bounds that some batch of the capacity takes, by cost; a batch takes the first that it fits."""
    # A batch that keeps to the others has fewer tokens, so there is a smaller capacity for it.
    usable = [(segments, largest) for segments, largest in bounds if segments * largest >= tokens]
    kept: list[tuple[int, int]] = []
    for segments, largest in sorted(usable, key=lambda b: (cost(*b), b)):
        if not any(segments <= s and largest <= size for s, size in kept):
            kept.append((segments, largest))
    return kept


def scan_cost(segments: int, largest: int, unpacked_from: int | None = None) -> int:
    """Return how many rows a packed attention backward scans for a bound; a single unpacked segment has no scan."""
    if unpacked_from is not None and segments == 1 and largest >= unpacked_from:
        return largest
    return max(segments, COMMON_SEGMENTS) << (largest - 1).bit_length()


def pack_buckets(capacities: Iterable[int], documents: int) -> list[Bucket]:
    """Return what is recorded for these capacities, with the limits (documents, tokens of the longest document).

    Args:
        capacities: Tokens.
        documents: Most documents of a pack.
    """
    limits = {capacity: segment_limits(capacity, min(documents, capacity)) for capacity in capacities}
    return [Bucket(capacity, bounds) for capacity, every in limits.items() for bounds in every]


def refuse_pack(
    lengths: Sequence[int], tokens: int, exact_below: int, bucket: Bucket, shards: int = 1, ranks: int = 1
) -> Fallback | None:
    """Return why a pack may not use a bucket that has room for its tokens, or None if it may.

    Args:
        lengths: Tokens of every document, with their padding.
        tokens: Tokens of the pack, at least the sum of `lengths`.
        exact_below: Packs of up to this many tokens on a rank must fill a bucket exactly.
        bucket: Has the limits (documents, tokens of the longest document).
        shards: Ranks that hold a part of the tokens each (sequence parallelism).
        ranks: Ranks that hold two chunks of every document each (context parallelism): padding is a document there.
    """
    documents, longest = bucket.limits
    if len(lengths) > documents:
        return Fallback.TOO_MANY_DOCUMENTS
    padding = bucket.tokens - sum(lengths) if ranks > 1 else 0
    if max(max(lengths), padding) > longest:
        return Fallback.DOCUMENT_TOO_LONG
    if tokens != bucket.tokens:
        if shards > 1:
            return Fallback.SHARDED_TOKENS
        if tokens <= exact_below * ranks:
            return Fallback.TOO_FEW_TOKENS
    return None


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
