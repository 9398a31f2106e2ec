"""What a page knows of a training run, wherever it was read."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError


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
class BucketCounts:
    """What one bucket did.

    Attributes:
        name: The bucket, as the plugin prints it.
        replays: Forward replays that a backward may follow.
        evaluations: Forward-only replays.
        padding_share: Padding tokens over all of its tokens, 0 to 1.
    """

    name: str
    replays: int
    evaluations: int
    padding_share: float


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
        buckets: What was used, by size.
        unused_buckets: How many were captured and never replayed.
    """

    replays: int
    fallbacks: Mapping[str, int]
    padding_share: float | None = None
    memory_gb: float | None = None
    capture_s: float | None = None
    warmup_microbatches: int | None = None
    buckets: tuple[BucketCounts, ...] = ()
    unused_buckets: int | None = None

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
        losses: (optimizer step from 1, loss).
        grad_norms: (optimizer step from 1, gradient norm).
        times: (optimizer step from 1, milliseconds of a step), each the mean over the steps since the one before it.
        ms: Median milliseconds of a step after warm-up, where the source has no single times.
        samples_per_s: Samples a second, all GPUs.
        images_per_s: Images and videos a second, all GPUs.
        tokens_per_s: Tokens of the language model a second, all GPUs, padding included.
        tflops_per_gpu: Model TFLOP/s of one GPU, by Bridge's count.
        peak_tflops: What one GPU can do at most, dense bf16.
        peak_gb: Peak of allocated device memory in GiB, of the GPU with the highest.
        graphs: Name of a kind of graphs (`KINDS`) -> what they did.
        error: Why the run failed, in one line.
        wrong: What it computes instead of what it should.
        gpu, date, command: Where it comes from.
        versions: Package -> version.
    """

    case: str
    mode: str
    losses: tuple[tuple[int, float], ...] = ()
    grad_norms: tuple[tuple[int, float], ...] = ()
    times: tuple[tuple[int, float], ...] = ()
    ms: float | None = None
    samples_per_s: float | None = None
    images_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    peak_tflops: float | None = None
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

    @property
    def flop_utilization(self) -> float | None:
        """Model TFLOP/s over what the GPU can do at most, 0 to 1."""
        return self.tflops_per_gpu / self.peak_tflops if self.tflops_per_gpu and self.peak_tflops else None

    def named(self, mode: str) -> "Run":
        """Return the run under another mode."""
        return replace(self, mode=mode)


def counts_of(statistics: Mapping[str, Any]) -> GraphCounts:
    """Return what the plugin's statistics say (`RegionStatistics.as_dict`)."""
    used = {name: b for name, b in statistics["buckets"].items() if b["replays"] + b["evaluations"]}
    return GraphCounts(
        replays=statistics["replays"],
        fallbacks=dict(statistics["fallbacks"]),
        padding_share=statistics["padding_share"],
        memory_gb=statistics["memory_bytes"] / GIB,
        capture_s=statistics["capture_seconds"],
        warmup_microbatches=statistics["warmup_microbatches"],
        buckets=tuple(_bucket(name, b) for name, b in used.items()),
        unused_buckets=len(statistics["buckets"]) - len(used),
    )


def _bucket(name: str, counts: Mapping[str, int]) -> BucketCounts:
    total = counts["tokens"] + counts["padding"]
    return BucketCounts(
        name=name,
        replays=counts["replays"],
        evaluations=counts["evaluations"],
        padding_share=counts["padding"] / total if total else 0.0,
    )


Series = tuple[tuple[int, float], ...]
EVENT_FILES = "**/*tfevents*"
_PREFIXES = {kind.name: f"{kind.group}/" for kind in KINDS}
_PEAK = "memory/mem-max-allocated-gigabytes"
_GB = 1e9


def read_events(folder: Path) -> Run:
    """Return the run that a folder's event files are of, those of its subfolders included.

    Raises:
        OptionError: The tensorboard package is missing, or the files have no loss.
    """
    scalars = _scalars(folder)
    losses = scalars.get(_loss_tag(scalars), ())
    if not losses:
        advice = "Train with logger.tensorboard_dir set; logger.tensorboard_log_interval says how often."
        raise OptionError.because("run", f"Cannot report {folder}: its event files have no loss. {advice}")
    return Run(
        case="run",
        mode=folder.resolve().name,
        losses=losses,
        grad_norms=scalars.get("grad-norm", ()),
        times=tuple((step, 1e3 * seconds) for step, seconds in scalars.get("iteration-time", ())),
        samples_per_s=_mean(scalars, "throughput/samples_per_sec"),
        tokens_per_s=_mean(scalars, "throughput/tokens_per_sec"),
        tflops_per_gpu=_mean(scalars, "throughput/tflops/device"),
        peak_gb=max((value * _GB / GIB for _, value in scalars.get(_PEAK, ())), default=None),
        graphs={title: _counts(scalars, p) for title, p in _PREFIXES.items() if f"{p}replays" in scalars},
    )


def _scalars(folder: Path) -> dict[str, Series]:
    """Return every scalar's (step, value); of what a resumed run wrote twice, the later value."""
    found: dict[str, dict[int, float]] = {}
    for part in sorted({path.parent for path in folder.glob(EVENT_FILES)}):
        events = _accumulator(part)
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: tuple(sorted(values.items())) for tag, values in found.items()}


def _accumulator(folder: Path) -> Any:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        why = f"tensorboard is not installed ({error}). Install it: pip install tensorboard."
        raise OptionError.because("run", f"Cannot read {folder}: {why}") from None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return events


def _loss_tag(scalars: Mapping[str, Series]) -> str:
    losses = [tag for tag in scalars if "loss" in tag and tag != "loss-scale" and "validation" not in tag]
    losses = [tag for tag in losses if not tag.endswith(" vs samples")]
    return "lm loss" if "lm loss" in losses else (losses or [""])[0]


def _mean(scalars: Mapping[str, Series], tag: str) -> float | None:
    """Return a figure's mean over what was logged after warm-up."""
    values = [value for step, value in scalars.get(tag, ()) if step > WARM_UP]
    return sum(values) / len(values) if values else None


def _counts(scalars: Mapping[str, Series], prefix: str) -> GraphCounts:
    reasons = f"{prefix}fallback/"
    return GraphCounts(
        replays=int(scalars[f"{prefix}replays"][-1][1]),
        fallbacks={tag.removeprefix(reasons): int(s[-1][1]) for tag, s in scalars.items() if tag.startswith(reasons)},
        padding_share=_last(scalars, f"{prefix}padding_share"),
        memory_gb=_last(scalars, f"{prefix}memory_gb"),
    )


def _last(scalars: Mapping[str, Series], tag: str) -> float | None:
    return scalars[tag][-1][1] if tag in scalars else None
