"""Capacities of buckets for sizes that are known beforehand."""

import math
from collections.abc import Sequence

from bridge_cg_plugin.graphs.planning.buckets import GRANULARITY, round_up

# Neighbors differ by at most this factor, which bounds the padding of sizes that were not shown.
LARGEST_STEP = 1.25


def plan_buckets(
    sizes: Sequence[int], *, merge_unit: int = 4, max_buckets: int = 12, exact_below: int = 0
) -> tuple[int, ...]:
    """Return capacities with the least padding for some sizes and a bounded one for sizes between them, ascending.

    Args:
        sizes: Token counts of microbatches, at least one.
        merge_unit: Capacities are multiples of this.
        max_buckets: Most buckets chosen for these sizes.
        exact_below: Sizes up to this get a capacity of exactly their size, as nothing else may hold them.
    """
    step = math.lcm(GRANULARITY, merge_unit)
    padded = [size for size in sizes if size > exact_below]
    candidates = sorted({round_up(size, step) for size in padded} | {round_up(max(sizes), step)})
    chosen = _least_padding(candidates, padded, max_buckets)
    return tuple(sorted({size for size in sizes if size <= exact_below} | set(_fill_gaps(chosen, step))))


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
