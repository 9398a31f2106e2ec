"""Choosing how many documents of a pack graphs take. Buckets are captured when training asks for them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bridge_cg_plugin.attention_bounds import pack_buckets, refuse_pack
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW, Bucket, choose
from bridge_cg_plugin.graphs.fallback import Fallback

from .documents import Pack, PlanError


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
# A smaller bound is faster: the smallest is taken that leaves at most this share of packs eager beside the largest.
LEFT_EAGER = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A document bound, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        on_graphs: Share of packs that replays.
        fallbacks: How many packs run eager, by reason.
    """

    max_packed_seqs: int
    on_graphs: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        sizes: P50, P90, P99 and the largest of documents and tokens of a pack, and of its longest document.
        choices: Every bound that was looked at, ascending.
        best: The recommended one.
        layout: How ranks share packs.
    """

    packs: int
    sizes: Mapping[str, tuple[int, ...]]
    choices: tuple[Choice, ...]
    best: Choice
    layout: str = str(RankLayout())


PARTS = (0.5, 0.9, 0.99, 1.0)


def percentiles(values: Iterable[int]) -> tuple[int, ...]:
    """Return the percentiles `PARTS` of at least one value: the smallest that so many of them do not exceed."""
    ordered = sorted(values)
    return tuple(ordered[max(math.ceil(part * len(ordered)) - 1, 0)] for part in PARTS)


def plan_packs(packs: Sequence[Pack], layout: RankLayout = ALONE) -> PackedPlan:
    """Find a document bound.

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
    choices = [expect(alike, bound, layout) for bound in sorted(bounds)]
    enough = max(choice.on_graphs for choice in choices) - LEFT_EAGER
    best = next(choice for choice in choices if choice.on_graphs >= enough)
    return PackedPlan(len(packs), sizes, tuple(choices), best, str(layout))


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


def expect(packs: Counter[Pack], bound: int, layout: RankLayout = ALONE) -> Choice:
    """Return what a document bound gives.

    Args:
        packs: Document lengths of each, and how many are alike.
        bound: Documents of one pack that a graph takes.
        layout: How ranks share packs.
    """
    fallbacks: Counter[Fallback] = Counter()
    for pack, count in packs.items():
        found = place(pack, pack_buckets([sum(pack)], bound), layout)
        if isinstance(found, Fallback):
            fallbacks[found] += count
    return Choice(bound, 1 - fallbacks.total() / packs.total(), tuple(sorted(fallbacks.items())))
