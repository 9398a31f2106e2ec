"""The report of a run's graphs, and the figures that loggers get."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

from .statistics import BucketStatistics, RegionStatistics

GIB = 2**30
SHOWN_RANKS = 16


SUMS = ("capture_seconds", "graph_bytes", "static_bytes", "gradient_bytes", "pinned_bytes")


def merge_statistics(parts: Sequence[RegionStatistics]) -> RegionStatistics:
    """Add up the statistics of several regions."""
    total = RegionStatistics(**{name: sum(getattr(part, name) for part in parts) for name in SUMS})
    for part in parts:
        total.fallbacks.update(part.fallbacks)
        for step, seconds in part.pauses.items():
            total.pauses[step] += seconds
        total.step_tokens = [sum(step) for step in zip_longest(total.step_tokens, part.step_tokens, fillvalue=0)]
        for bucket, counts in part.buckets.items():
            total.buckets.setdefault(bucket, BucketStatistics()).add(counts)
    runs = sorted((run for part in parts for run in part.last_fallbacks), key=lambda run: run.step)
    total.last_fallbacks.extend(dict.fromkeys(runs))  # parts of layers fall back together, which is said once
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
        **pause_metrics([statistics], prefix),
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
        **{name: max(rank[name] for rank in each) for name in (f"{prefix}/memory_gb", f"{prefix}/pinned_gb")},
        **pause_metrics(ranks, prefix),
        f"{prefix}/ranks": float(len(ranks)),
        f"{prefix}/smallest_replayed_share": min(rank[f"{prefix}/replayed_share"] for rank in each),
        f"{prefix}/largest_padding_share": max(rank[f"{prefix}/padding_share"] for rank in each),
        f"{prefix}/token_imbalance": token_imbalance(ranks),
    }


def pause_metrics(ranks: Sequence[RegionStatistics], prefix: str) -> dict[str, float]:
    """Return for how long a job's steps waited for recordings, in all and at most: each step for the slowest rank."""
    pauses = pauses_of_job(ranks).values()
    return {f"{prefix}/pause_s": float(sum(pauses)), f"{prefix}/longest_pause_s": max(pauses, default=0.0)}


def pauses_of_job(ranks: Sequence[RegionStatistics]) -> dict[int, float]:
    """Return for how long each step waited for recordings of the rank that took longest, in seconds."""
    steps = sorted({step for rank in ranks for step in rank.pauses})
    return {step: max(rank.pauses.get(step, 0.0) for rank in ranks) for step in steps}


def token_imbalance(ranks: Sequence[RegionStatistics]) -> float:
    """Return how many times the mean tokens of a step the rank with the most has, over the last steps.

    Returns:
        1 where all have as many; 0 where there are none. Where steps are not counted, all replays are one step.
    """
    steps = [step for step in zip(*_tokens_of_steps(ranks), strict=True) if any(step)]
    return fmean(max(step) / fmean(step) for step in steps) if steps else 0.0


def _tokens_of_steps(ranks: Sequence[RegionStatistics]) -> list[list[int]]:
    """Return each rank's tokens in the last steps that all have; of all replays where steps are not counted."""
    steps = min(len(rank.step_tokens) for rank in ranks)
    return [rank.step_tokens[-steps:] if steps else [rank.replayed_tokens] for rank in ranks]


def render_ranks(ranks: Mapping[int, RegionStatistics], title: str) -> str:
    """Return a table of the ranks, of many only those that have the most tokens a step: the others wait for them.

    It also shows how long each rank recorded after the first capture, and how long it waited meanwhile for others that
    took longer in the same step.

    Args:
        ranks: Statistics by the number of their rank.
        title: The first line.
    """
    tokens = dict(zip(ranks, _tokens_of_steps(list(ranks.values())), strict=True))
    most = [max(step) for step in zip(*tokens.values(), strict=True)]
    paused = sum(pauses_of_job(list(ranks.values())).values())
    shown = sorted(sorted(ranks, key=lambda rank: -sum(tokens[rank]))[:SHOWN_RANKS])
    lines = [
        title,
        f"{'rank':>6} {'replays':>8} {'eager':>6} {'padding':>8} {'memory GiB':>11} {'tokens/step':>12} {'most in':>8} "
        f"{'records s':>10} {'waits s':>8}",
    ]
    for rank in shown:
        found, own = ranks[rank], tokens[rank]
        share = fmean(mine == step > 0 for mine, step in zip(own, most, strict=True))
        lines.append(
            f"{rank:>6} {found.replays:>8} {sum(found.fallbacks.values()):>6} {found.padding_share:>8.1%} "
            f"{found.memory_bytes / GIB:>11.2f} {fmean(own):>12.0f} {share:>8.0%} "
            f"{found.pause_seconds:>10.1f} {paused - found.pause_seconds:>8.1f}"
        )
    left = len(ranks) - len(shown)
    return "\n".join([*lines, *([f"and {left} ranks with fewer tokens a step"] if left else [])])


def render_steps(ranks: Sequence[RegionStatistics], before: RegionStatistics, title: str) -> str:
    """Return what happened since an earlier look: one line, and a second one where microbatches ran eager.

    Args:
        ranks: Statistics of all ranks now.
        before: The sum of what they were then.
        title: Begins the first line.

    Returns:
        Nothing where no microbatch ran.
    """
    now = merge_statistics(ranks)
    eager = now.fallbacks - before.fallbacks
    replays = now.replays - before.replays
    runs = replays + eager.total()
    if not runs:
        return ""
    tokens, padding = now.replayed_tokens - before.replayed_tokens, now.padding - before.padding
    memory = max(rank.memory_bytes for rank in ranks) / GIB
    line = (
        f"{title}: {replays} of {runs} microbatches replayed ({replays / runs:.1%}), "
        f"padding {padding / max(tokens + padding, 1):.1%}, {memory:.2f} GiB"
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
    fallbacks = ", ".join(f"{reason} {n}" for reason, n in sorted(statistics.fallbacks.items())) or "none"
    lines += [
        f"buckets not used: {len(statistics.buckets) - len(used)}",
        f"eager fallbacks: {fallbacks}",
        *_last_fallbacks(statistics),
        f"warm-up microbatches: {statistics.warmup_microbatches}; "
        f"padding over all replays: {statistics.padding_share:.1%}",
        f"captured in {statistics.capture_seconds:.1f} s{_pauses(statistics)}; "
        f"{statistics.memory_bytes / GIB:.2f} GiB of device memory "
        f"({statistics.static_bytes / GIB:.2f} static buffers)",
    ]
    if statistics.pinned_bytes:
        lines.append(f"offloaded activations: {statistics.pinned_bytes / GIB:.2f} GiB of page-locked host memory")
    lines += [f"{name}: {text}" for name, text in (notes or {}).items()]
    return "\n".join(lines)


def _pauses(statistics: RegionStatistics) -> str:
    """Return how long steps waited for recordings after the first capture, where any did."""
    if not statistics.pauses:
        return ""
    waited = f"{len(statistics.pauses)} step(s) waited {statistics.pause_seconds:.1f} s of it"
    return f", {waited}, at most {statistics.longest_pause:.1f} s before or in one step"


def _last_fallbacks(statistics: RegionStatistics) -> list[str]:
    """Return the last microbatches that ran eager, and what to do about the most frequent reason."""
    if not statistics.fallbacks:
        return []
    ((reason, _),) = statistics.fallbacks.most_common(1)
    last = ", ".join(map(str, statistics.last_fallbacks))
    return [f"last fallbacks: {last}", f"remedy of {reason}: {reason.remedy.replace('`', '')}"]
