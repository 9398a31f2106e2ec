"""What a page has of a training run, wherever it was read, and whether runs train what eager runs train."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# (optimizer step from 1, value).
Series = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """One kind of graphs.

    Attributes:
        name: On the page.
        title: First line of the plugin's report at the end of training.
        group: What tags of its figures in loggers begin with.
        field: Field of a benchmark record that has its statistics.
    """

    name: str
    title: str
    group: str
    field: str


KINDS = (
    GraphKind("vision", "vision CUDA graphs", "vision_cuda_graph", "graphs"),
    GraphKind("audio", "audio CUDA graphs", "audio_cuda_graph", "audio_graphs"),
    GraphKind("language model", "language-model CUDA graphs", "language_model_cuda_graph", "language_model_graphs"),
    GraphKind("packed sequences", "packed-sequence CUDA graphs", "packed_cuda_graph", "packed_graphs"),
)

# Steps whose times do not count: eager warm-up, capture, the first replays.
WARM_UP = 6
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """What one model's graphs did; a figure that the source does not have is None.

    Attributes:
        replays: All replays.
        fallbacks: Reason -> microbatches that ran eager for it.
        padding_share: Padding tokens over all tokens replayed, 0 to 1.
        memory_gb: Device memory of pools and static buffers in GiB.
        capture_s: Seconds of capture.
        warmup_microbatches: Eager microbatches before capture.
    """

    replays: int
    fallbacks: Mapping[str, int]
    padding_share: float | None = None
    memory_gb: float | None = None
    capture_s: float | None = None
    warmup_microbatches: int | None = None

    @property
    def replayed_share(self) -> float:
        """Replays over replays and fallbacks, 0 to 1."""
        runs = self.replays + sum(self.fallbacks.values())
        return self.replays / runs if runs else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run. Empty or None is what its source does not say.

    Attributes:
        case: What was trained; runs of one case are compared.
        mode: How: "eager", "eager1", "plugin", "upstream" or any other name.
        losses, grad_norms: By step.
        times: Milliseconds of a step, each the mean over the steps since the one before it.
        ms: Median milliseconds of a step after warm-up, where the source has no single times.
        samples_per_s, tokens_per_s: Of all GPUs in a second; tokens of the language model, with padding.
        tflops_per_gpu: Model TFLOP/s of one GPU, by Bridge's count.
        peak_gb: Peak of allocated device memory in GiB, of the GPU with the highest.
        graphs: Name of a kind of graphs (`KINDS`) -> what they did.
        error: Why the run failed, in one line.
        wrong: What it computes instead of what it should.
        gpu, date, command: Where it comes from.
        versions: Package -> version.
    """

    case: str
    mode: str
    losses: Series = ()
    grad_norms: Series = ()
    times: Series = ()
    ms: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    peak_gb: float | None = None
    graphs: Mapping[str, GraphCounts] = field(default_factory=dict)
    error: str = ""
    wrong: str = ""
    gpu: str = ""
    date: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_eager(self) -> bool:
        """Whether this is one of the runs that the others are held against."""
        return self.mode.rstrip("0123456789") == "eager"

    @property
    def settled_ms(self) -> tuple[float, ...]:
        """Milliseconds of a step, without those that warm-up or capture are part of."""
        starts = (0, *(step for step, _ in self.times))
        return tuple(ms for start, (_, ms) in zip(starts, self.times, strict=False) if start >= WARM_UP)

    @property
    def median_ms(self) -> float | None:
        """Median milliseconds of a step after warm-up, of all steps where there are no others."""
        times = self.settled_ms or (() if self.ms else tuple(ms for _, ms in self.times))
        return statistics.median(times) if times else self.ms


def counts_of(statistics: Mapping[str, Any]) -> GraphCounts:
    """Return what the plugin's statistics say (`RegionStatistics.as_dict`)."""
    return GraphCounts(
        replays=statistics["replays"],
        fallbacks=dict(statistics["fallbacks"]),
        padding_share=statistics["padding_share"],
        memory_gb=statistics["memory_bytes"] / GIB,
        capture_s=statistics["capture_seconds"],
        warmup_microbatches=statistics["warmup_microbatches"],
    )


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


def how_eager_fares(*values: Sequence[Sequence[float]]) -> str:
    """Return a sentence on eager runs that the other eager runs judge, for a graphed run that is outside.

    Where these put some of them outside, the graphed one may be so by chance.

    Args:
        values: The eager runs' losses, and what else is compared, of the same runs in the same order.
    """
    count = len(values[0])
    if count < 3:
        return f"{count} eager runs say little of what eager can do: give more."
    inside = [True] * count
    for runs in values:
        for i, run in enumerate(runs):
            inside[i] &= compare_to_spread([*runs[:i], *runs[i + 1 :]], run).inside
    outside = inside.count(False)
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
    """

    case: str
    mode: str
    state: State
    reason: str


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
    worst = ", ".join(f"{name} {s.worst:.3g} at step {run.losses[s.step][0]}" for name, s in found.items())
    reason = (
        f"Largest distance to the nearest of {len(usable)} eager runs over what they allow: {worst}; 1 is the limit."
    )
    inside = all(s.inside for s in found.values())
    if inside and run.graphs and not any(counts.replays for counts in run.graphs.values()):
        return Verdict(run.case, run.mode, "unknown", f"Nothing was replayed: this is an eager run. {reason}")
    if not inside:
        reason += f" {how_eager_fares(*(eager_values for *eager_values, _ in values.values()))}"
    return Verdict(run.case, run.mode, "same" if inside else "different", reason)


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


def _same_steps(series: Iterable[Series]) -> bool:
    steps = {tuple(step for step, _ in points) for points in series}
    return len(steps) == 1 and steps != {()}


def _values(points: Series) -> list[float]:
    return [value for _, value in points]
