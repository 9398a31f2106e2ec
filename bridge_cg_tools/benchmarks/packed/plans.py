"""Whether the planner's expectations hold: what it predicts for its choice, and every choice that it could have made.

A choice's time is the sum over packs of what each takes on the recording that the choice gives it, or eager. So every
choice is measured by running each pack once on each recording that some choice gives it. Recordings whose bounds
attention scans alike are one; the recommended choice is captured once more on its own, as a user would.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import COMMON_SEGMENTS
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.language.packed.fit import pack_buckets
from bridge_cg_tools.planner.cost import CostModel
from bridge_cg_tools.planner.packing import Pack, first_fit_shuffle
from bridge_cg_tools.planner.plan import Choice, candidates, expect, place, plan_packs

# Document lengths, and how often each comes.
DISTRIBUTIONS = {
    "mixed": ([50, 200, 700, 2500], [4, 6, 3, 1]),
    "long": ([700, 1500, 3000], [2, 3, 1]),
    "short": ([20, 60, 120, 300], [3, 5, 4, 1]),
}
DOCUMENTS = 4000
PACK_SIZE = 4096
MEASURED_PACKS = 16
# How far a prediction may be from what is measured, and the choice from the best of all.
OFF, LOST = 0.05, 0.02

# What a pack runs on; None is eager.
Place = Bucket | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to set the options: documents of one pack, and capacities in tokens."""

    bound: int
    buckets: tuple[int, ...]


class Distribution:
    """One distribution's packs, the planner's choice for them, and all that it could have chosen.

    Args:
        name: Of the distribution.
        cost: What the planner goes by.
    """

    def __init__(self, name: str, cost: CostModel) -> None:
        lengths = random.Random(0).choices(*DISTRIBUTIONS[name], k=DOCUMENTS)
        packs = first_fit_shuffle(lengths, PACK_SIZE)
        self.name, self.cost = name, cost
        self.drawn: list[Pack] = random.Random(1).sample(packs, MEASURED_PACKS)
        self.best: Choice = plan_packs(packs, cost).best
        bounds, buckets = candidates(packs)
        self.candidates = [Candidate(bound, some) for bound in bounds for some in buckets]
        self.chosen = Candidate(self.best.max_packed_seqs, self.best.buckets)

    def predicted_ms(self, candidate: Candidate) -> float:
        """Return what the planner expects of a choice for the packs that are measured, in ms a microbatch."""
        return expect(Counter(self.drawn), self.cost, candidate.bound, candidate.buckets).step_ms

    def places(self) -> dict[Candidate, list[Place]]:
        """Return what each measured pack runs on, by choice; recordings that are scanned alike are one."""
        found = {candidate: [self._place(candidate, pack) for pack in self.drawn] for candidate in self.candidates}
        widest = _widest(p for places in found.values() for p in places if p is not None)
        return {c: [None if p is None else widest[_kind(p)] for p in places] for c, places in found.items()}

    @staticmethod
    def _place(candidate: Candidate, pack: Pack) -> Place:
        found = place(pack, pack_buckets(candidate.buckets, candidate.bound))
        return found if isinstance(found, Bucket) else None

    def measured(self, run: Callable[[int, Place], float]) -> dict[Candidate, float]:
        """Return the time of every choice in ms a microbatch.

        Args:
            run: Returns the ms of the pack with this number on a recording, or eager.
        """
        places = self.places()
        needed = dict.fromkeys((number, each) for row in places.values() for number, each in enumerate(row))
        ms = {pair: run(*pair) for pair in needed}
        return {c: sum(ms[pair] for pair in enumerate(row)) / len(row) for c, row in places.items()}


def _kind(bucket: Bucket) -> tuple[int, int, int]:
    """Return what attention scans for a recording."""
    documents, longest = bucket.limits
    return bucket.tokens, max(documents, COMMON_SEGMENTS), (longest - 1).bit_length()


def _widest(buckets: Iterator[Bucket]) -> dict[tuple[int, int, int], Bucket]:
    """Return a recording of each kind that takes what any of its kind takes."""
    widest: dict[tuple[int, int, int], Bucket] = {}
    for bucket in buckets:
        other = widest.get(_kind(bucket), bucket)
        limits = tuple(map(max, bucket.limits, other.limits))
        widest[_kind(bucket)] = Bucket(bucket.tokens, limits)
    return widest


def records_of(
    case: str, found: Distribution, alone_ms: float, choices: dict[Candidate, float]
) -> list[dict[str, Any]]:
    """Return a distribution's records: the recommended choice alone, and the best choice of every bound.

    Args:
        case: Name of the records' case.
        found: The distribution.
        alone_ms: What the recommended choice took when it was captured on its own.
        choices: What every choice took.
    """
    rows = [("plugin", found.chosen, alone_ms), ("exhaustive_chosen", found.chosen, choices[found.chosen])]
    bounds = dict.fromkeys(candidate.bound for candidate in choices)
    best_of = [min((c for c in choices if c.bound == bound), key=choices.__getitem__) for bound in bounds]
    rows += [(f"exhaustive_{candidate.bound}", candidate, choices[candidate]) for candidate in best_of]
    return [
        {
            "case": case,
            "mode": mode,
            "tokens": PACK_SIZE,
            "max_packed_seqs": candidate.bound,
            "bucket": ",".join(map(str, candidate.buckets)),
            "ms": ms,
            "predicted_ms": found.predicted_ms(candidate),
            "chosen": candidate == found.chosen,
        }
        for mode, candidate, ms in rows
    ]


def misses(case: str, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what of a distribution's records misses what is wanted."""
    modes = {record["mode"]: record for record in records}
    if "plugin" not in modes:
        yield f"{case}: the recommended choice was not measured"
        return
    alone, chosen = modes["plugin"], modes["exhaustive_chosen"]
    if abs(alone["predicted_ms"] / alone["ms"] - 1) > OFF:
        yield f"{case}: predicted {alone['predicted_ms']:.1f} ms, measured {alone['ms']:.1f} ms"
    best = min((r for mode, r in modes.items() if mode != "plugin"), key=lambda r: r["ms"])
    if chosen["ms"] > (1 + LOST) * best["ms"]:
        yield (
            f"{case}: the choice takes {chosen['ms']:.1f} ms, the best {best['ms']:.1f} "
            f"({best['max_packed_seqs']} documents, {best['bucket']})"
        )
