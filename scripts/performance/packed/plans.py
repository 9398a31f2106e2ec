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
from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.packing import Pack, first_fit_shuffle
from bridge_cg_plugin.cli.planner.plan import Choice, candidates, expect, place, plan_packs
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.language.packed.fit import pack_buckets

# Document lengths, and how often each comes.
DISTRIBUTIONS = {
    "mixed": ([50, 200, 700, 2500], [4, 6, 3, 1]),
    "long": ([700, 1500, 3000], [2, 3, 1]),
    "short": ([20, 60, 120, 300], [3, 5, 4, 1]),
}
# Documents of a pack as packs have them in the field: the share that has at most so many. Lengths are drawn evenly.
KNOWN = "known"
KNOWN_COUNTS = ((0.5, 12), (0.9, 43), (0.96, 64), (0.99, 106), (1.0, 358))
KNOWN_PACKS = 2000
NAMES = (*DISTRIBUTIONS, KNOWN)
DOCUMENTS = 4000
PACK_SIZE = 4096
# Cases of records begin with one of these.
COSTS, PLAN = "costs_", "plan_"
MEASURED_PACKS = 16
# Packs from the one of the fewest documents to the one of the most: a few at random would have none of many.
MEASURED_KNOWN = 10
# How far a prediction may be from what is measured, and the choice from the best of all.
OFF, LOST = 0.05, 0.02

# What a pack runs on; None is eager.
Place = Bucket | None


def packs_of(name: str) -> list[Pack]:
    """Return all packs of a distribution."""
    if name == KNOWN:
        every = known_packs(PACK_SIZE)
        return [every[i * (len(every) - 1) // (MEASURED_KNOWN - 1)] for i in range(MEASURED_KNOWN)]
    lengths = random.Random(0).choices(*DISTRIBUTIONS[name], k=DOCUMENTS)
    return first_fit_shuffle(lengths, PACK_SIZE)


def known_packs(tokens: int, count: int = KNOWN_PACKS, seed: int = 0) -> list[Pack]:
    """Return packs whose numbers of documents follow `KNOWN_COUNTS`, geometrically between its points.

    Args:
        tokens: Of each pack.
        count: Packs.
        seed: Of the documents' lengths.
    """
    rng, packs = random.Random(seed), []
    for index in range(count):
        share = (index + 0.5) / count
        points = zip([(0.0, 1), *KNOWN_COUNTS], KNOWN_COUNTS, strict=False)
        (low, least), (high, most) = next(pair for pair in points if share <= pair[1][0])
        number = round(least * (most / least) ** ((share - low) / (high - low)))
        cuts = sorted(rng.sample(range(1, tokens), number - 1))
        packs.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)))
    return packs


def drawn(name: str) -> list[Pack]:
    """Return the packs of a distribution that are measured."""
    return _drawn(name, packs_of(name))


def _drawn(name: str, packs: list[Pack]) -> list[Pack]:
    return packs if name == KNOWN else random.Random(1).sample(packs, MEASURED_PACKS)


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
        packs = packs_of(name)
        self.name, self.cost = name, cost
        self.drawn = _drawn(name, packs)
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
