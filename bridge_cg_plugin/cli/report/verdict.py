"""Whether runs train what eager runs train."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .runs import Run
from .spread import Spread, compare_to_spread, how_eager_fares

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
