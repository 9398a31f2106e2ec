"""Whether a graphed run stays inside what two eager runs differ by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FACTOR = 1.5
# Rounding of one printed loss; two eager runs agree to the bit in their first steps.
FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Spread:
    """Result of a comparison.

    Attributes:
        inside: Whether every step of the third run is within `FACTOR` times the spread of the first two so far.
        worst: Largest distance over its allowance.
        step: Where that was.
    """

    inside: bool
    worst: float
    step: int


def compare_to_spread(first: Sequence[float], second: Sequence[float], third: Sequence[float]) -> Spread:
    """Compare a run with two eager ones, step by step.

    Differences of training runs grow with the steps, so step t's allowance is the largest difference of the two eager
    runs up to t, times `FACTOR`, and at least `FLOOR` of the value. The third run's distance is to the nearer one.

    Raises:
        ValueError: The runs differ in length or are empty.
    """
    if not first or not len(first) == len(second) == len(third):
        lengths = f"{len(first)}, {len(second)} and {len(third)}"
        raise ValueError(f"the runs have {lengths} steps; all must have the same number, not 0")
    spread, worst, place, inside = 0.0, -1.0, 0, True
    for step, (a, b, c) in enumerate(zip(first, second, third, strict=True)):
        spread = max(spread, abs(a - b))
        allowance = max(FACTOR * spread, FLOOR * abs(a))
        share = min(abs(c - a), abs(c - b)) / allowance
        inside = inside and share <= 1  # a NaN is not inside
        if not (share <= worst or math.isnan(worst)):
            worst, place = share, step
    return Spread(inside, worst, place)
