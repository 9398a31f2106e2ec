"""Choosing a bound and buckets for packs: little padding, and nearly all packs on graphs."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bridge_cg_plugin.attention_bounds import pack_buckets, refuse_pack
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW, GRANULARITY, Bucket, choose, round_up
from bridge_cg_plugin.graphs.fallback import Fallback

from .documents import Pack, PlanError

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


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks that share packs.

    Attributes:
        tensor: Ranks of tensor parallelism.
        context: Ranks of context parallelism.
        sequence: Whether tensor-parallel ranks hold a part of the tokens each.
    """

    tensor: int = 1
    context: int = 1
    sequence: bool = False

    @property
    def shards(self) -> int:
        """Ranks that hold a part of the tokens each."""
        return self.tensor if self.sequence else 1

    @property
    def document_unit(self) -> int:
        """What a document's tokens, with its padding, are a multiple of."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def unit(self) -> int:
        """What a bucket's tokens are a multiple of, so that every rank has as many."""
        return math.lcm(self.shards * self.context, self.document_unit)

    def __str__(self) -> str:
        return f"TP{self.tensor}xCP{self.context}{'xSP' if self.sequence and self.tensor > 1 else ''}"


ALONE = RankLayout()
MAX_BUCKETS = 12
# Capacities are multiples of this, and of what ranks ask for.
MERGE_UNIT = 4
# A smaller bound is faster: the smallest is taken that leaves at most this share of packs eager beside the largest.
LEFT_EAGER = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A document bound, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        on_graphs: Share of packs that replays.
        padding: Padding tokens over all tokens replayed.
        fallbacks: How many packs run eager, by reason.
    """

    max_packed_seqs: int
    on_graphs: float
    padding: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        sizes: P50, P90, P99 and the largest of documents and tokens of a pack, and of its longest document.
        buckets: Capacities in tokens.
        choices: Every bound that was looked at, ascending.
        best: The recommended one.
        layout: How ranks share packs.
    """

    packs: int
    sizes: Mapping[str, tuple[int, ...]]
    buckets: tuple[int, ...]
    choices: tuple[Choice, ...]
    best: Choice
    layout: str = str(RankLayout())


PARTS = (0.5, 0.9, 0.99, 1.0)


def percentiles(values: Iterable[int]) -> tuple[int, ...]:
    """Return the percentiles `PARTS` of at least one value: the smallest that so many of them do not exceed."""
    ordered = sorted(values)
    return tuple(ordered[max(math.ceil(part * len(ordered)) - 1, 0)] for part in PARTS)


def plan_packs(packs: Sequence[Pack], layout: RankLayout = ALONE) -> PackedPlan:
    """Find a document bound and buckets.

    Args:
        packs: Document lengths of every pack, which are multiples of what the layout asks for.
        layout: How ranks share packs.

    Raises:
        PlanError: There is no pack.
    """
    if not packs:
        raise PlanError("Cannot plan without packs: the data holds fewer documents than one microbatch takes.")
    sizes = {
        "documents": percentiles(map(len, packs)),
        "tokens": percentiles(map(sum, packs)),
        "longest document": percentiles(map(max, packs)),
    }
    most, alike = sizes["documents"][-1], Counter(packs)
    bounds = {*sizes["documents"], *(1 << n for n in range(2, most.bit_length() + 1))}
    buckets = _buckets([sum(pack) for pack in packs], layout)
    choices = [expect(alike, bound, buckets, layout) for bound in sorted(bounds)]
    enough = max(choice.on_graphs for choice in choices) - LEFT_EAGER
    best = next(choice for choice in choices if choice.on_graphs >= enough)
    return PackedPlan(len(packs), sizes, buckets, tuple(choices), best, str(layout))


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


def expect(packs: Counter[Pack], bound: int, buckets: tuple[int, ...], layout: RankLayout = ALONE) -> Choice:
    """Return what a document bound gives: each pack takes the first bucket that accepts it.

    Args:
        packs: Document lengths of each, and how many are alike.
        bound: Documents of one pack that a graph takes.
        buckets: Capacities in tokens.
        layout: How ranks share packs.
    """
    recorded = pack_buckets(buckets, bound)
    real = padded = 0
    fallbacks: Counter[Fallback] = Counter()
    for pack, count in packs.items():
        found = place(pack, recorded, layout)
        if isinstance(found, Fallback):
            fallbacks[found] += count
        else:
            real, padded = real + count * sum(pack), padded + count * found.tokens
    on_graphs = 1 - fallbacks.total() / packs.total()
    return Choice(bound, on_graphs, 1 - real / padded if padded else 0.0, tuple(sorted(fallbacks.items())))


def _buckets(tokens: Sequence[int], layout: RankLayout) -> tuple[int, ...]:
    if layout.shards > 1:  # packs cannot be padded: the sizes that come most often
        return tuple(sorted(size for size, _ in Counter(tokens).most_common(MAX_BUCKETS)))
    unit, exact_below = max(layout.unit, MERGE_UNIT), EXACT_BELOW * layout.context
    return plan_buckets(tokens, merge_unit=unit, max_buckets=MAX_BUCKETS, exact_below=exact_below)
