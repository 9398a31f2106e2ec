"""Whether a graphed run stays inside what eager runs differ by."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

FACTOR = 1.5
# Rounding of one printed loss; eager runs agree to the bit in their first steps.
FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Spread:
    """Result of a comparison.

    Attributes:
        inside: Whether every step is within `FACTOR` times the spread of the eager runs so far.
        worst: Largest distance over its allowance.
        step: Where that was.
    """

    inside: bool
    worst: float
    step: int

    @property
    def share(self) -> float:
        """Largest distance as a share of the spread; `FACTOR` is the limit."""
        return self.worst * FACTOR


def compare_to_spread(eager: Sequence[Sequence[float]], graphs: Sequence[float]) -> Spread:
    """Compare a run with eager ones, step by step.

    Differences of training runs grow with the steps, so step t's allowance is the largest difference of any two eager
    runs up to t, times `FACTOR`, and at least `FLOOR` of the value. The run's distance is to the nearest eager one. Two
    eager runs can happen to be much closer than a third is to either; `docs/performance.md` has figures.

    Raises:
        ValueError: Fewer than two eager runs, or runs of different length or none.
    """
    if len(eager) < 2:
        raise ValueError(f"a spread needs at least 2 eager runs, got {len(eager)}")
    lengths = [len(run) for run in (*eager, graphs)]
    if 0 in lengths or len(set(lengths)) > 1:
        raise ValueError(f"the runs have {', '.join(map(str, lengths))} steps; all must have the same number, not 0")
    spread, worst, place, inside = 0.0, -1.0, 0, True
    for step, (*values, candidate) in enumerate(zip(*eager, graphs, strict=True)):
        spread = max(spread, *(abs(a - b) for a, b in itertools.combinations(values, 2)))
        allowance = max(FACTOR * spread, FLOOR * abs(values[0]))
        share = min(abs(candidate - value) for value in values) / allowance
        inside = inside and share <= 1  # a NaN is not inside
        if not (share <= worst or math.isnan(worst)):
            worst, place = share, step
    return Spread(inside, worst, place)


def each_by_others(runs: Sequence[Sequence[float]]) -> list[Spread]:
    """Compare every run with the others, as if these were the eager ones.

    Raises:
        ValueError: As `compare_to_spread`; that takes three runs.
    """
    return [compare_to_spread([*runs[:i], *runs[i + 1 :]], run) for i, run in enumerate(runs)]


def outside_by_others(*values: Sequence[Sequence[float]]) -> int:
    """Return how many eager runs are outside where the others are their eager ones; arguments as `how_eager_fares`.

    Raises:
        ValueError: As `each_by_others`.
    """
    judged = zip(*map(each_by_others, values), strict=True)
    return sum(not all(found.inside for found in of_run) for of_run in judged)


def how_eager_fares(*values: Sequence[Sequence[float]]) -> str:
    """Return a sentence on eager runs that the other eager runs judge, for a graphed run that is outside.

    Where these put some of them outside, the graphed one may be so by chance.

    Args:
        values: The eager runs' losses, and what else is compared, of the same runs in the same order.
    """
    count = len(values[0])
    if count < 3:
        return f"{count} eager runs say little of what eager can do: give more."
    outside = outside_by_others(*values)
    said = f"Judged in the same way by the others, {outside} of {count} eager runs are outside"
    return f"{said} as well: give more." if outside else f"{said}."
