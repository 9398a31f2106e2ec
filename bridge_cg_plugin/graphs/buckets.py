"""Choosing bucket capacities from the sizes that warm-up steps saw, and the bucket of a batch. Imports no torch."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .fallback import Fallback

# Attention and GEMM kernels work on tiles of this many tokens; finer capacities save nothing.
GRANULARITY = 64
# Up to here matrix libraries choose kernels by the number of rows, so padding would change eager's rounding.
EXACT_BELOW = 256
# Between the planned capacities, neighbours differ by at most this factor, which bounds the padding of sizes that
# warm-up did not show. A further bucket costs capture time and little memory: it shares its slot's pool.
LARGEST_STEP = 1.25


class Bucket(NamedTuple):
    """What one recording of a region is made for. Every replay looks it up several times: a tuple, hashed in C.

    Attributes:
        tokens: Capacity.
        limits: Further upper bounds that the program gave the recording; the engine knows no meaning of them.
    """

    tokens: int
    limits: tuple[int, ...] = ()

    def contains(self, other: "Bucket") -> bool:
        """Whether both have the same capacity and every limit here is at least the other's."""
        return self.tokens == other.tokens and all(a >= b for a, b in zip(self.limits, other.limits, strict=True))

    def __str__(self) -> str:
        return "/".join(map(str, (self.tokens, *self.limits)))


def choose(tokens: int, buckets: Iterable[Bucket], refuse: Callable[[Bucket], Fallback | None]) -> Bucket | Fallback:
    """Return the first bucket that accepts a batch, or the reason why none does.

    Args:
        tokens: The batch's size.
        buckets: In the order in which they are tried.
        refuse: Returns why the batch may not use a bucket that has room for its tokens, or None if it may.
    """
    reason = Fallback.TOO_MANY_TOKENS
    for bucket in buckets:
        if tokens <= bucket.tokens:
            refusal = refuse(bucket)
            if refusal is None:
                return bucket
            reason = refusal
    return reason


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Capacities in tokens, ascending, with what they mean for the sizes they were planned from.

    Attributes:
        capacities: The buckets.
        padding_share: Padding over all tokens if the observed sizes come again, 0 to 1.
        observed: How many sizes the plan rests on.
    """

    capacities: tuple[int, ...]
    padding_share: float
    observed: int

    def __str__(self) -> str:
        buckets = f"buckets {', '.join(map(str, self.capacities))} tokens"
        if not self.observed:
            return buckets
        return (
            f"{buckets}, chosen from {self.observed} observed microbatches ({self.padding_share:.1%} padding on those)"
        )


def plan_buckets(
    sizes: Sequence[int],
    *,
    largest: int | None = None,
    merge_unit: int = 4,
    max_buckets: int = 12,
    capacity_limit: int | None = None,
    exact_below: int = 0,
    headroom: float = 1.0,
) -> BucketPlan:
    """Choose capacities with the least padding for `sizes` and a bounded one for sizes between them.

    Args:
        sizes: Token counts of observed microbatches.
        largest: Capacity of the largest bucket; None takes the largest size.
        merge_unit: Capacities are multiples of this.
        max_buckets: Most buckets chosen for the observed sizes.
        capacity_limit: Capacity that memory allows; larger ones are cut to it.
        exact_below: Sizes up to this get a capacity of exactly their size, as nothing else may hold them.
        headroom: Without `largest`, how far capacities reach beyond the largest size, as a factor.

    Raises:
        ValueError: No size and no `largest`, so there is nothing to plan from.
    """
    step = math.lcm(GRANULARITY, merge_unit)
    top = largest if largest is not None else _round_up(math.ceil(max(sizes, default=0) * headroom), step)
    if top < merge_unit:
        raise ValueError("no microbatch was seen in the warm-up steps and no largest capacity is given")
    if capacity_limit is not None:
        top = max(min(top, capacity_limit // merge_unit * merge_unit), merge_unit)
    fitting = [size for size in sizes if size <= top]
    exact = sorted({size for size in fitting if size <= exact_below})
    padded_sizes = [size for size in fitting if size > exact_below]
    candidates = sorted({min(_round_up(size, step), top) for size in padded_sizes} | {top})
    chosen = _least_padding(candidates, padded_sizes, max_buckets)
    capacities = sorted({*exact, *_fill_gaps(chosen, step)})
    padded = sum(min(c for c in capacities if c >= size) for size in fitting)
    share = 1 - sum(fitting) / padded if padded else 0.0
    return BucketPlan(tuple(capacities), share, len(sizes))


def _least_padding(candidates: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Pick at most `count` candidates, the last among them, so that padding each size up costs least."""
    if len(candidates) <= count:
        return list(candidates)
    ordered = sorted(sizes)
    below = [sum(size <= c for size in ordered) for c in candidates]
    # cost[j]: padded tokens of all sizes up to candidate j when j is the last bucket, for the current bucket count.
    cost = [below[j] * candidates[j] for j in range(len(candidates))]
    choice = [[-1] * len(candidates)]
    for _ in range(count - 1):
        longer, previous = list(cost), [-1] * len(candidates)
        for j in range(len(candidates)):
            for i in range(j):
                value = cost[i] + (below[j] - below[i]) * candidates[j]
                if value < longer[j]:
                    longer[j], previous[j] = value, i
        cost = longer
        choice.append(previous)
    picked, j = [], len(candidates) - 1
    for previous in reversed(choice):
        if j < 0:
            break
        if previous[j] >= 0:
            picked.append(candidates[j])
            j = previous[j]
    picked.append(candidates[j])
    return sorted(set(picked) | {candidates[-1]})


def _fill_gaps(capacities: Sequence[int], step: int) -> list[int]:
    """Add capacities between neighbours that differ by more than `LARGEST_STEP`."""
    filled = [capacities[0]]
    for capacity in capacities[1:]:
        gaps = math.ceil(math.log(capacity / filled[-1]) / math.log(LARGEST_STEP))
        ratio, start = (capacity / filled[-1]) ** (1 / max(gaps, 1)), filled[-1]
        for i in range(1, gaps):
            between = _round_up(math.ceil(start * ratio**i), step)
            if filled[-1] < between < capacity:
                filled.append(between)
        filled.append(capacity)
    return filled


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


# A packed attention backward in cuDNN scans segments x largest segment, each rounded up (segments to at least 32, the
# largest to a power of two), padding included: over 27 layers on an H200 it takes 4.3 ms for 32 x 4096 and 17 ms for
# 512 x 1024. So a capacity is recorded for several bounds, and a batch takes the cheapest that it fits.
COMMON_SEGMENTS = 32
SMALLEST_FRACTION = 8
# From this many tokens on a single frame attends unpacked, without a scan; below, packing costs less than a capture.
UNPACKED_FROM = 768
# Up to this many tokens an encoder's kernels leave so much of an H200 idle that side work pays (docs/performance.md).
SIDE_WORK_UP_TO = 4096
# Below this many tokens the scan is cheap enough for one bound per frame count.
SMALL_CAPACITY = 1024
# Attention that is called directly scans segments x largest segment as they are: 30,000 rows of 16 heads in a
# millisecond of 27 layers on an H200. Each bound costs a capture and two of cuDNN's plans, so there are few: a few
# segments and many, of similar size, which scan this many rows a token, and a few of any size.
FEW_SEGMENTS, MANY_SEGMENTS, ANY_SEGMENTS = 8, 32, 16
SCANNED_ROWS = 4
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


def scanned_limits(tokens: int, max_frames: int) -> list[tuple[int, int]]:
    """Return the bounds as `frame_limits`, for attention that scans exactly frames x largest frame.

    There are five at most: one frame where it attends unpacked, few and many of similar size, few of any size, and
    whatever else fits.
    """
    few, many, any_size = (min(n, max_frames) for n in (FEW_SEGMENTS, MANY_SEGMENTS, ANY_SEGMENTS))
    bounds = {(max_frames, tokens)}
    if tokens >= UNPACKED_FROM:
        bounds.add((1, tokens))
    if tokens <= SMALL_CAPACITY:
        bounds.add((few, tokens))
    else:
        similar = {(n, min(_round_up(-(-tokens * SCANNED_ROWS // n), GRANULARITY), tokens)) for n in (few, many)}
        bounds |= {*similar, (any_size, tokens)}
    return _cheapest_first(bounds, tokens, lambda segments, largest: segments * largest)


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
