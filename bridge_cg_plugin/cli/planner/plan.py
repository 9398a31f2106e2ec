"""Choosing bounds and buckets for packs by padding, and by what packs cost that run eager."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bridge_cg_plugin.attention_bounds import pack_buckets, refuse_pack
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW, GRANULARITY, Bucket, choose, round_up
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.options import OptionError

from ..measured import Costs
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


_WRITTEN = re.compile(r"TP(\d+)xCP(\d+)(xSP)?", re.IGNORECASE)
_ALLOWED = "TP1xCP1, or another layout: TP and CP with their ranks, xSP for sequence parallelism"


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


def parse_layout(field: str, value: Any) -> RankLayout:
    """Return a layout from its text.

    Raises:
        OptionError: It is none.
    """
    found = _WRITTEN.fullmatch(str(value).strip())
    if found is None or "0" in (found[1].lstrip("0") or "0", found[2].lstrip("0") or "0"):
        raise OptionError(field, value, _ALLOWED, "Correct it.")
    return RankLayout(int(found[1]), int(found[2]), found[3] is not None)


ALONE = RankLayout()
MAX_BUCKETS = 12
# Capacities are multiples of this, and of what ranks ask for.
MERGE_UNIT = 4
BUCKET_COUNTS = (1, 2, 4, 8, MAX_BUCKETS)
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
# A further document bound, or bucket, must save this part of the cost.
WORTH = 0.001


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50, P90, P99 and the largest of some sizes."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What to expect of packs.

    Attributes:
        ratio: Their time over eager, by measured ratios.
        on_graphs: Share that replays.
        padding: Padding tokens over all tokens replayed.
        fallbacks: How many run eager, by reason.
    """

    ratio: float
    on_graphs: float
    padding: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to set the options, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        buckets: Capacities in tokens.
        expected: Of the packs.
    """

    max_packed_seqs: int
    buckets: tuple[int, ...]
    expected: Expected


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        documents: Documents of a pack.
        tokens: Tokens of a pack.
        longest: Tokens of the longest document of a pack.
        choices: Every bound that was looked at, with its best buckets, ascending.
        best: The recommended one.
        origin: Which records the ratios are of.
        layout: How ranks share packs.
    """

    packs: int
    documents: Percentiles
    tokens: Percentiles
    longest: Percentiles
    choices: tuple[Choice, ...]
    best: Choice
    origin: str
    layout: str = str(RankLayout())


def percentiles(values: Iterable[int]) -> Percentiles:
    """Return the percentiles of at least one value: the smallest that so many parts of them do not exceed."""
    ordered = sorted(values)
    return Percentiles(*(ordered[_rank(share, len(ordered))] for share in (0.5, 0.9, 0.99, 1.0)))


def _rank(share: float, count: int) -> int:
    return max(math.ceil(share * count) - 1, 0)


def plan_packs(packs: Sequence[Pack], costs: Costs, layout: RankLayout = ALONE) -> PackedPlan:
    """Find the document bound and the buckets with the least expected cost.

    Args:
        packs: Document lengths of every pack.
        costs: What microbatches cost.
        layout: How ranks share packs, whose lengths are multiples of what it asks for.

    Raises:
        PlanError: There is no pack.
    """
    if not packs:
        raise PlanError("Cannot plan without packs: the data holds fewer documents than one microbatch takes.")
    counts, alike = sorted(len(pack) for pack in packs), Counter(packs)
    powers = (1 << n for n in range(2, counts[-1].bit_length() + 1))
    bounds = {counts[_rank(share, len(counts))] for share in SHARES} | {n for n in powers if n <= 2 * counts[-1]}
    capacities = sorted(_bucket_sets([sum(pack) for pack in packs], layout), key=len)
    choices = [_cheapest([expect(alike, costs, n, each, layout) for each in capacities]) for n in sorted(bounds)]
    return PackedPlan(
        packs=len(packs),
        documents=percentiles(counts),
        tokens=percentiles(sum(pack) for pack in packs),
        longest=percentiles(max(pack) for pack in packs),
        choices=tuple(choices),
        best=_cheapest(choices),
        origin=costs.origin,
        layout=str(layout),
    )


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


def expect(
    packs: Counter[Pack], costs: Costs, bound: int, buckets: tuple[int, ...], layout: RankLayout = ALONE
) -> Choice:
    """Return what a document bound and buckets give: each pack takes the first bucket and bound that accepts it.

    Args:
        packs: Document lengths of each, and how many are alike.
        costs: What they cost.
        bound: Documents of one pack that a graph takes.
        buckets: Capacities in tokens.
        layout: How ranks share packs.
    """
    recorded = pack_buckets(buckets, bound)
    replayed = real = padded = 0
    eager = left = 0.0  # what eager costs: of all packs, of those that run eager
    fallbacks: Counter[Fallback] = Counter()
    for pack, count in packs.items():
        tokens, found = sum(pack), place(pack, recorded, layout)
        cost = count * costs.eager(tokens)
        eager += cost
        if isinstance(found, Fallback):
            fallbacks[found] += count
            left += cost
        else:
            replayed, real, padded = replayed + count, real + count * tokens, padded + count * found.tokens
    expected = Expected(
        ratio=(padded + left) / eager,
        on_graphs=replayed / packs.total(),
        padding=1 - real / padded if padded else 0.0,
        fallbacks=tuple(sorted(fallbacks.items())),
    )
    return Choice(bound, buckets, expected)


def _bucket_sets(tokens: Sequence[int], layout: RankLayout) -> list[tuple[int, ...]]:
    """Return bucket lists from few to many, up to what automatic planning would make."""
    if layout.shards > 1:  # packs cannot be padded: the sizes that come most often
        usual = [size for size, _ in Counter(tokens).most_common(MAX_BUCKETS)]
        return list(dict.fromkeys(tuple(sorted(usual[:count])) for count in BUCKET_COUNTS))
    exact_below = EXACT_BELOW * layout.context
    plans = (
        plan_buckets(tokens, merge_unit=max(layout.unit, MERGE_UNIT), max_buckets=n, exact_below=exact_below)
        for n in BUCKET_COUNTS
    )
    return list(dict.fromkeys(plans))


def _cheapest(choices: Sequence[Choice]) -> Choice:
    """Return the cheapest; of those that cost all but as little, the first."""
    least = min(choice.expected.ratio for choice in choices)
    return next(choice for choice in choices if choice.expected.ratio <= least * (1 + WORTH))
