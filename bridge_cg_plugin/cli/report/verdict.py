"""Whether runs train what eager runs train."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .runs import Run

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


State = Literal["same", "different", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one run's parity with the eager runs of its case.

    Attributes:
        case: The run's case.
        mode: The run's mode.
        state: "same", "different", or "unknown" where nothing can be said.
        reason: Why, in a sentence.
        loss: The comparison of the losses, None without one.
        norm: That of the gradient norms.
    """

    case: str
    mode: str
    state: State
    reason: str
    loss: Spread | None = None
    norm: Spread | None = None


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Return the verdict of every run that is not eager."""
    return [_verdict(run, [e for e in runs if e.is_eager and e.case == run.case]) for run in runs if not run.is_eager]


def _verdict(run: Run, eager: Sequence[Run]) -> Verdict:
    reason = _not_comparable(run, eager)
    if reason:
        return Verdict(run.case, run.mode, "unknown", reason)
    usable = [e for e in eager if not e.error]
    values = {"losses": [_values(r.losses) for r in (*usable, run)]}
    if _same_steps([r.grad_norms for r in (*usable, run)]):
        values["gradient norms"] = [_values(r.grad_norms) for r in (*usable, run)]
    found = {name: compare_to_spread(eager_values, own) for name, (*eager_values, own) in values.items()}
    loss, norm = found["losses"], found.get("gradient norms")
    worst = ", ".join(f"{name} {s.worst:.3g} at step {run.losses[s.step][0]}" for name, s in found.items())
    reason = (
        f"Largest distance to the nearest of {len(usable)} eager runs over what they allow: {worst}; 1 is the limit."
    )
    inside = all(s.inside for s in found.values())
    if inside and run.graphs and not any(counts.replays for counts in run.graphs.values()):
        return Verdict(
            run.case, run.mode, "unknown", f"Nothing was replayed: this is an eager run. {reason}", loss, norm
        )
    if not inside:
        reason += f" {how_eager_fares(*(eager_values for *eager_values, _ in values.values()))}"
    return Verdict(run.case, run.mode, "same" if inside else "different", reason, loss, norm)


def _not_comparable(run: Run, eager: Sequence[Run]) -> str:
    usable = [e for e in eager if not e.error]
    if run.error:
        return f"The run failed: {run.error}"
    if len(usable) < 2:
        failed = f", and {len(eager) - len(usable)} failed" if len(usable) < len(eager) else ""
        return f"What eager runs differ by is not known: that takes 2 of them or more, here are {len(usable)}{failed}."
    if not _same_steps([r.losses for r in (*usable, run)]):
        counts = ", ".join(f"{r.mode} {len(r.losses)}" for r in (*usable, run))
        return f"The runs logged losses of different steps ({counts}); train and log the same ones."
    return ""


def _same_steps(series: Iterable[tuple[tuple[int, float], ...]]) -> bool:
    steps = {tuple(step for step, _ in points) for points in series}
    return len(steps) == 1 and steps != {()}


def _values(points: tuple[tuple[int, float], ...]) -> list[float]:
    return [value for _, value in points]
