"""Choosing bounds and buckets for packs by expected time."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import EXACT_BELOW, Bucket, choose, plan_buckets
from bridge_cg_plugin.language.packed.fit import pack_buckets, refuse_pack
from bridge_cg_plugin.options.layout import RankLayout

from .cost import CostModel
from .errors import PlanError
from .packing import Pack

ALONE = RankLayout()
MAX_BUCKETS = 12
# Capacities are multiples of this, and of what ranks ask for.
MERGE_UNIT = 4
BUCKET_COUNTS = (1, 2, 4, 8, MAX_BUCKETS)
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
# A further document bound, or bucket, must save this part of the time.
WORTH = 0.001


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50, P90, P99 and the largest of some sizes."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to set the options, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        buckets: Capacities in tokens.
        step_ms: Mean time of a microbatch, forward and backward.
        on_graphs: Share of packs that replay.
        padding: Padding tokens over all tokens replayed.
        memory_gb: GiB of one slot.
        fallbacks: Packs that run eager, by reason.
    """

    max_packed_seqs: int
    buckets: tuple[int, ...]
    step_ms: float
    on_graphs: float
    padding: float
    memory_gb: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        documents: Documents of a pack.
        tokens: Tokens of a pack.
        longest: Tokens of the longest document of a pack.
        eager_ms: Mean time of a microbatch without graphs.
        choices: Every bound that was looked at, with its best buckets, ascending.
        best: The recommended one.
        origin: Where the cost model comes from.
        layout: How ranks share packs.
    """

    packs: int
    documents: Percentiles
    tokens: Percentiles
    longest: Percentiles
    eager_ms: float
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


def plan_packs(
    packs: Sequence[Pack], cost: CostModel, max_memory_gb: float | None = None, layout: RankLayout = ALONE
) -> PackedPlan:
    """Find the document bound and the buckets with the least expected time.

    Args:
        packs: Document lengths of every pack.
        cost: What a microbatch costs.
        max_memory_gb: Limit of one slot's memory; None is no limit.
        layout: How ranks share packs, whose lengths are multiples of what it asks for.

    Raises:
        PlanError: There is no pack, or no choice fits the memory.
    """
    if not packs:
        raise PlanError("Cannot plan without packs: the data holds fewer documents than one microbatch takes.")
    bounds, capacities = candidates(packs, layout)
    counts, alike = [len(pack) for pack in packs], Counter(packs)
    choices = []
    for bound in bounds:
        found = [expect(alike, cost, bound, buckets, layout) for buckets in capacities]
        if found := [choice for choice in found if _fits(choice, max_memory_gb)]:
            choices.append(_cheapest(sorted(found, key=lambda c: len(c.buckets))))
    if not choices:
        raise PlanError(
            f"Cannot use --max-memory-gb {max_memory_gb:g}: it must be at least "
            f"{rounded_up(cost.memory_gb(min(b[-1] for b in capacities)))}, for a graph of the largest packs."
        )
    eager = sum(cost.eager_ms(pack) * n for pack, n in alike.items()) / len(packs)
    return PackedPlan(
        packs=len(packs),
        documents=percentiles(counts),
        tokens=percentiles(sum(pack) for pack in packs),
        longest=percentiles(max(pack) for pack in packs),
        eager_ms=eager,
        choices=tuple(choices),
        best=_cheapest(choices),
        origin=cost.origin,
        layout=str(layout),
    )


def candidates(packs: Sequence[Pack], layout: RankLayout = ALONE) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the document bounds, ascending, and the bucket lists, from few to many, that plans are chosen from."""
    counts = sorted(len(pack) for pack in packs)
    bounds = {counts[_rank(share, len(counts))] for share in SHARES} | _powers(counts[-1])
    return sorted(bounds), _bucket_sets([sum(pack) for pack in packs], layout)


def expect(
    packs: Counter[Pack], cost: CostModel, bound: int, buckets: tuple[int, ...], layout: RankLayout = ALONE
) -> Choice:
    """Return what a document bound and buckets give: each pack takes the first bucket and bound that accepts it."""
    recorded = pack_buckets(buckets, bound)
    total = replayed = real = padded = 0.0
    fallbacks: Counter[Fallback] = Counter()
    for pack, count in packs.items():
        found = place(pack, recorded, layout)
        if isinstance(found, Fallback):
            fallbacks[found] += count
            total += count * cost.eager_ms(pack)
            continue
        replayed += count
        real += count * sum(pack)
        padded += count * found.tokens
        total += count * cost.graph_ms(found.tokens, pack, *found.limits)
    everything = packs.total()
    return Choice(
        max_packed_seqs=bound,
        buckets=buckets,
        step_ms=total / everything,
        on_graphs=replayed / everything,
        padding=1 - real / padded if padded else 0.0,
        memory_gb=cost.memory_gb(buckets[-1]),
        fallbacks=tuple(sorted(fallbacks.items())),
    )


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


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
    return list(dict.fromkeys(plan.capacities for plan in plans))


def _powers(largest: int) -> set[int]:
    return {1 << n for n in range(2, largest.bit_length() + 1) if 1 << n <= 2 * largest}


def rounded_up(gigabytes: float) -> float:
    """Return a size that is large enough, with one digit behind the point."""
    return math.ceil(gigabytes * 10) / 10


def _fits(choice: Choice, max_memory_gb: float | None) -> bool:
    return max_memory_gb is None or choice.memory_gb <= max_memory_gb


def _cheapest(choices: Sequence[Choice]) -> Choice:
    """Return the fastest; of those that are all but as fast, the first."""
    least = min(choice.step_ms for choice in choices)
    return next(choice for choice in choices if choice.step_ms <= least * (1 + WORTH))
