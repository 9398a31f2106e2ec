"""What a region did: replays per bucket, padding, fallbacks, memory, capture time; reports, and figures for loggers."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ..announce import LOGGER, announce, rank
from .buckets import Bucket
from .fallback import Fallback

GIB = 2**30
OF_THE_WORST_RANK = ("memory_gb", "pinned_gb", "pause_s", "longest_pause_s")
SUMS = ("capture_seconds", "pause_seconds", "graph_bytes", "static_bytes", "gradient_bytes", "pinned_bytes")
# What JSON has besides fallbacks and buckets.
FIGURES = (
    *("replays", "warmup_microbatches", "padding_share", "capture_seconds", "pause_seconds", "longest_pause"),
    *("memory_bytes", "static_bytes", "gradient_bytes", "pinned_bytes"),
)


@dataclass(slots=True)
class BucketStatistics:
    """Counts of one bucket.

    Attributes:
        replays: Forward replays that a backward may follow.
        evaluations: Forward-only replays.
        tokens: Real tokens replayed, forward-only ones included.
        padding: Padding tokens.
    """

    replays: int = 0
    evaluations: int = 0
    tokens: int = 0
    padding: int = 0

    def add(self, other: "BucketStatistics") -> None:
        """Add another region's counts of the bucket."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass(slots=True)
class RegionStatistics:
    """Counts of one region since it was made.

    Attributes:
        fallbacks: Microbatches that ran eager, by reason.
        known: Reasons that were announced; regions of one module share the set.
        step: Number of the training step under way, from 1; 0 where nobody counts them.
        capture_seconds: Time that recordings took.
        pause_seconds: Of those after the first capture, which training steps waited for; other ranks may have, too.
        longest_pause: The most that one step waited for.
        graph_bytes: Device memory of graphs.
        static_bytes: Device memory of static buffers.
        gradient_bytes: Device memory of parameter gradients that are handed to autograd, of all recordings.
        pinned_bytes: Page-locked host memory of offloaded activations.
    """

    buckets: dict[Bucket, BucketStatistics] = field(default_factory=dict)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    known: set[Fallback] = field(default_factory=set)
    step: int = 0
    warmup_microbatches: int = 0
    capture_seconds: float = 0.0
    pause_seconds: float = 0.0
    longest_pause: float = 0.0
    graph_bytes: int = 0
    static_bytes: int = 0
    gradient_bytes: int = 0
    pinned_bytes: int = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside, in which something is recorded."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.capture_seconds += time.perf_counter() - started

    def replayed(self, bucket: Bucket, tokens: int, training: bool) -> None:
        """Count one replay of `tokens` real tokens."""
        counts = self.buckets[bucket]
        if training:
            counts.replays += 1
        else:
            counts.evaluations += 1
        counts.tokens += tokens
        counts.padding += bucket.tokens - tokens

    def fell_back(self, where: str, reason: Fallback, tokens: int | None = None) -> None:
        """Count a microbatch that runs eager; the first for each reason is announced, the others logged for debugging.

        Args:
            where: Name of the region or the module.
            reason: Why it does.
            tokens: Its size, if it is known.
        """
        run = f"step {self.step} {reason}" + ("" if tokens is None else f" ({tokens} tokens)")
        self.fallbacks[reason] += 1
        LOGGER.debug("[rank %d] %s runs eager: %s", rank(), where, run)
        if reason not in self.known:
            self.known.add(reason)
            announce(f"{where} runs eager, {run}: {reason.meaning}. Remedy: {reason.remedy}.".replace("`", ""))

    @property
    def replays(self) -> int:
        """All replays."""
        return sum(b.replays + b.evaluations for b in self.buckets.values())

    @property
    def padding_share(self) -> float:
        """Padding tokens over all tokens replayed, 0 to 1."""
        padding = sum(bucket.padding for bucket in self.buckets.values())
        return padding / max(padding + sum(bucket.tokens for bucket in self.buckets.values()), 1)

    @property
    def memory_bytes(self) -> int:
        """Device memory of graphs, static buffers and gradients."""
        return self.graph_bytes + self.static_bytes + self.gradient_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for logs and JSON."""
        return {
            "fallbacks": {reason.value: count for reason, count in self.fallbacks.items()},
            "buckets": {str(bucket): asdict(counts) for bucket, counts in sorted(self.buckets.items())},
            **{name: getattr(self, name) for name in FIGURES},
        }


def merge_statistics(parts: Sequence[RegionStatistics]) -> RegionStatistics:
    """Add up the statistics of several regions."""
    total = RegionStatistics(**{name: sum(getattr(part, name) for part in parts) for name in SUMS})
    for part in parts:
        total.fallbacks.update(part.fallbacks)
        total.longest_pause = max(total.longest_pause, part.longest_pause)
        for bucket, counts in part.buckets.items():
            total.buckets.setdefault(bucket, BucketStatistics()).add(counts)
    return total


def counts_of(parts: Sequence[RegionStatistics]) -> RegionStatistics:
    """Return what a module counted whose regions are no more; the first part's is the module's own."""
    total = merge_statistics(parts)
    total.known, total.step = parts[0].known, parts[0].step
    total.graph_bytes = total.static_bytes = total.gradient_bytes = total.pinned_bytes = 0
    return total


def metrics(statistics: RegionStatistics, prefix: str) -> dict[str, float]:
    """Return the scalars for TensorBoard and W&B, by tag; every tag starts with `prefix/`."""
    fallbacks = sum(statistics.fallbacks.values())
    runs = statistics.replays + fallbacks
    return {
        f"{prefix}/replays": float(statistics.replays),
        f"{prefix}/fallbacks": float(fallbacks),
        f"{prefix}/replayed_share": statistics.replays / runs if runs else 0.0,
        f"{prefix}/padding_share": statistics.padding_share,
        f"{prefix}/memory_gb": statistics.memory_bytes / GIB,
        f"{prefix}/pinned_gb": statistics.pinned_bytes / GIB,
        f"{prefix}/pause_s": statistics.pause_seconds,
        f"{prefix}/longest_pause_s": statistics.longest_pause,
        **{f"{prefix}/fallback/{reason}": float(n) for reason, n in sorted(statistics.fallbacks.items())},
    }


def metrics_of_ranks(ranks: Sequence[RegionStatistics], prefix: str) -> dict[str, float]:
    """Return the scalars of several ranks: counts and shares over all, the largest memory, and how far ranks differ."""
    total = metrics(merge_statistics(ranks), prefix)
    if len(ranks) == 1:
        return total
    each = [metrics(rank, prefix) for rank in ranks]
    return {
        **total,
        **{name: max(rank[name] for rank in each) for name in (f"{prefix}/{of}" for of in OF_THE_WORST_RANK)},
        f"{prefix}/ranks": float(len(ranks)),
        f"{prefix}/smallest_replayed_share": min(rank[f"{prefix}/replayed_share"] for rank in each),
        f"{prefix}/largest_padding_share": max(rank[f"{prefix}/padding_share"] for rank in each),
    }


def render_steps(ranks: Sequence[RegionStatistics], title: str) -> str:
    """Return what happened so far: one line, and a second one where microbatches ran eager.

    Args:
        ranks: Statistics of all ranks.
        title: Begins the first line.

    Returns:
        Nothing where no microbatch ran.
    """
    now = merge_statistics(ranks)
    eager, replays = now.fallbacks, now.replays
    runs = replays + eager.total()
    if not runs:
        return ""
    memory = max(rank.memory_bytes for rank in ranks) / GIB
    line = (
        f"{title}: {replays} of {runs} microbatches replayed ({replays / runs:.1%}), "
        f"padding {now.padding_share:.1%}, {memory:.2f} GiB"
    )
    if not eager:
        return line
    (most, _), *_ = counts = eager.most_common()
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts)
    return f"{line}\n  ran eager: {reasons}. Remedy of {most}: {most.remedy.replace('`', '')}"


def render(statistics: RegionStatistics, title: str, notes: Mapping[str, str] | None = None) -> str:
    """Return the report as text."""
    lines = [title, f"{'bucket':>16} {'replays':>8} {'eval':>6} {'padding':>8}"]
    used = {bucket: c for bucket, c in sorted(statistics.buckets.items()) if c.replays + c.evaluations}
    for bucket, counts in used.items():
        share = counts.padding / max(counts.tokens + counts.padding, 1)
        lines.append(f"{bucket!s:>16} {counts.replays:>8} {counts.evaluations:>6} {share:>8.1%}")
    fallbacks, remedies, waited = sorted(statistics.fallbacks.items()), list[str](), ""
    if fallbacks:
        ((most, _),) = statistics.fallbacks.most_common(1)
        remedies.append(f"remedy of {most}: {most.remedy.replace('`', '')}")
    if statistics.pause_seconds:
        waited = f", of which steps waited {statistics.pause_seconds:.1f} s, at most {statistics.longest_pause:.1f} s "
        waited += "before or in one"
    lines += [
        f"buckets not used: {len(statistics.buckets) - len(used)}",
        f"eager fallbacks: {', '.join(f'{reason} {n}' for reason, n in fallbacks) or 'none'}",
        *remedies,
        f"warm-up microbatches: {statistics.warmup_microbatches}; "
        f"padding over all replays: {statistics.padding_share:.1%}",
        f"captured in {statistics.capture_seconds:.1f} s{waited}; "
        f"{statistics.memory_bytes / GIB:.2f} GiB of device memory "
        f"({statistics.static_bytes / GIB:.2f} static buffers)",
    ]
    if statistics.pinned_bytes:
        lines.append(f"offloaded activations: {statistics.pinned_bytes / GIB:.2f} GiB of page-locked host memory")
    lines += [f"{name}: {text}" for name, text in (notes or {}).items()]
    return "\n".join(lines)
