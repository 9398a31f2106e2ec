"""Where the time of a profiled training step went: its parts, idle time and families of kernels.

A part begins with a kernel of its own name on the stream that computes, so that parts are told apart by the device's
clock, whatever the host does meanwhile.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from scripts.performance.measuring.measure import Span, family, kernels_of, merged

VISION, BETWEEN, LANGUAGE_MODEL, OPTIMIZER, IDLE = PARTS = ("vision", "between", "language model", "optimizer", "idle")
END = "end"
MARKER = "spin_kernel"  # what torch.cuda._sleep launches, and nothing that trains
COMMUNICATION = family("nccl")
MOST_GAPS, NAME_WIDTH = 8, 60


def begin_part() -> None:
    """Launch the marker."""
    torch.cuda._sleep(0)


def parts_of(spans: Sequence[Span], marks: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a record that say where a step's time went.

    A moment belongs to the part that the last marker before it began, and is idle where nothing ran.

    Args:
        spans: What the GPU did, in any order, markers included.
        marks: The parts that the markers began, in the order of their launch; the last is `END`.

    Raises:
        ValueError: There are more or fewer markers among the spans.
    """
    starts = sorted(start for start, _, name in spans if MARKER in name)
    if len(starts) != len(marks):
        raise ValueError(f"the profile has {len(starts)} markers of {len(marks)}")
    work = [(max(s, starts[0]), min(e, starts[-1]), n) for s, e, n in spans if MARKER not in n]
    work = [span for span in work if span[1] > span[0]]
    busy = merged([(start, end) for start, end, _ in work])
    found = dict.fromkeys(PARTS, 0.0)
    for part, begin, end in zip(marks, starts, starts[1:], strict=False):
        ran = _within(busy, begin, end)
        found[part] += ran / 1e3
        found[IDLE] += (end - begin - ran) / 1e3
    kernels = kernels_of(work)
    return {
        "parts_ms": found,
        "idle_share": 1 - kernels.busy_ms / ((starts[-1] - starts[0]) / 1e3),
        "idle_gaps": _gaps(work, marks, starts)[:MOST_GAPS],
        "families": _families(work, marks, starts),
        "gpu_busy_ms": kernels.busy_ms,
        "kernels": kernels.count,
    }


def _within(busy: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return how long one of `busy`, which do not overlap and are ordered, ran between two moments."""
    first = max(bisect_right(busy, (begin, float("inf"))) - 1, 0)
    total = 0.0
    for start, stop in busy[first:]:
        if start >= end:
            break
        total += max(min(stop, end) - max(start, begin), 0.0)
    return total


def _gaps(work: Sequence[Span], marks: Sequence[str], starts: Sequence[float]) -> list[dict[str, Any]]:
    """Return where nothing ran, the longest in all first, by the part that waits and the kernels before and after."""
    found: dict[tuple[str, str, str], list[float]] = {}
    last, before = starts[0], END
    for start, end, name in [*sorted(work), (starts[-1], starts[-1], END)]:
        if start > last:
            part = marks[max(bisect_left(starts, start) - 1, 0)]
            found.setdefault((part, before[:NAME_WIDTH], name[:NAME_WIDTH]), []).append((start - last) / 1e3)
        if end > last:
            last, before = end, name
    gaps = [
        {"part": part, "after": before, "before": after, "count": len(each), "ms": sum(each)}
        for (part, before, after), each in found.items()
    ]
    return sorted(gaps, key=lambda gap: -gap["ms"])


def _families(work: Sequence[Span], marks: Sequence[str], starts: Sequence[float]) -> dict[str, float]:
    """Return ms by family of kernels; all that the optimizer runs is one family, but for communication."""
    found: dict[str, float] = {}
    for start, end, name in work:
        key = family(name)
        if key != COMMUNICATION and marks[bisect_right(starts, start) - 1] == OPTIMIZER:
            key = OPTIMIZER
        found[key] = found.get(key, 0.0) + (end - start) / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))
