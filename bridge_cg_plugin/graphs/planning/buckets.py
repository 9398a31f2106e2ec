"""Choosing bucket capacities from the sizes that warm-up steps saw, and the bucket of a batch. Imports no torch."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..fallback import Fallback

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
        limits: Further upper bounds that the program gave the recording; the engine does not interpret them.
    """

    tokens: int
    limits: tuple[int, ...] = ()

    def contains(self, other: "Bucket") -> bool:
        """Whether both have the same capacity and every limit here is at least the other's."""
        return self.tokens == other.tokens and all(a >= b for a, b in zip(self.limits, other.limits, strict=True))

    def __str__(self) -> str:
        return "/".join(map(str, (self.tokens, *self.limits)))


def any_size(tokens: int, capacity: int) -> int:
    """Return the capacity: every size up to it may share its bucket."""
    return capacity


def raised(limit: int, needed: int) -> int:
    """Return a limit, doubled until it is at least what is needed."""
    while limit < needed:
        limit *= 2
    return limit


def named_buckets(limits: Iterable[tuple[int, ...]] | None, capacity: int) -> list[Bucket]:
    """Return the buckets of a capacity that were named with their limits; none where none was."""
    return [Bucket(tokens, tuple(bounds)) for tokens, *bounds in limits or () if tokens == capacity]


def next_run_options(buckets: Iterable[Bucket], capacities_field: str, limits_field: str) -> str:
    """Return the options by which another run records these buckets and no others."""
    found = sorted(buckets)
    words = [f"{capacities_field}=[{','.join(map(str, dict.fromkeys(bucket.tokens for bucket in found)))}]"]
    if limited := [str(bucket) for bucket in found if bucket.limits]:
        words.append(f"{limits_field}={'+'.join(limited)}")
    return f"{' '.join(words)} names the same buckets for the next run"


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
        padding_share: Padding over all tokens if the observed sizes come next_run_options, 0 to 1.
        observed: How many sizes the plan rests on.
    """

    capacities: tuple[int, ...]
    padding_share: float
    observed: int

    def __str__(self) -> str:
        if not self.capacities:
            return "no bucket yet"
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
    last_alike: Callable[[int, int], int] = any_size,
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
        last_alike: Returns a capacity where it holds a size, which is no larger, else a size before it that does.

    Raises:
        ValueError: No size and no `largest`, so there is nothing to plan from.
    """
    step = math.lcm(GRANULARITY, merge_unit)
    top = largest if largest is not None else round_up(math.ceil(max(sizes, default=0) * headroom), step)
    if top < merge_unit:
        raise ValueError("no microbatch was seen in the warm-up steps and no largest capacity is given")
    if capacity_limit is not None:
        top = max(min(top, capacity_limit // merge_unit * merge_unit), merge_unit)
    fitting = [size for size in sizes if size <= top]
    exact = sorted({size for size in fitting if size <= exact_below})
    padded_sizes = [size for size in fitting if size > exact_below]
    candidates = sorted({min(round_up(size, step), top) for size in padded_sizes} | {top})
    chosen = _least_padding(candidates, padded_sizes, max_buckets)
    capacities = _with_alike({*exact, *_fill_gaps(chosen, step)}, padded_sizes, step, last_alike)
    padded = sum(next(c for c in capacities if c >= size and last_alike(size, c) == c) for size in fitting)
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
            between = round_up(math.ceil(start * ratio**i), step)
            if filled[-1] < between < capacity:
                filled.append(between)
        filled.append(capacity)
    return filled


def _with_alike(
    capacities: set[int], sizes: Iterable[int], step: int, last_alike: Callable[[int, int], int]
) -> list[int]:
    """Return capacities, with more of them for sizes that share no bucket with one that is little larger."""
    found = set(capacities)
    for size in sorted(set(sizes), reverse=True):
        nearest, *others = sorted(c for c in found if c >= size)
        near = [nearest, *(c for c in others if c <= LARGEST_STEP * size)]
        if not any(last_alike(size, capacity) == capacity for capacity in near):
            found.add(last_alike(size, min(round_up(size, step), nearest)))
    return sorted(found)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of a step that is no less than a value."""
    return -(-value // step) * step
