"""How soon a run's microbatches are on graphs after warm-up, and how many of them are."""

from typing import Any

# Steps after warm-up from which on the share counts: buckets have come by then.
SETTLED_STEP = 10


def first_graphed_s(run: dict[str, Any]) -> float | None:
    """Return the seconds from the end of the last warm-up step until the first step that replays begins to train.

    Returns:
        Captures are part of it, between these steps or inside the first one; None of a run without times or replays.
    """
    counts, step_ms = run.get("step_graphs") or [], run["step_ms"]
    graphed = next((number for number, count in enumerate(counts) if count["replays"]), None)
    if graphed is None or not step_ms:
        return None
    first = _first_after_warmup(counts)
    inside = counts[graphed]["capture_s"] - counts[graphed]["capture_s_before"]
    between = sum(count["between_s"] for count in counts[first : graphed + 1])
    return float(between + sum(step_ms[first:graphed]) / 1e3 + inside)


def settled_graph_share(run: dict[str, Any]) -> float | None:
    """Return the share of microbatches that were replayed from the 10th step after warm-up on; None without any."""
    counts = run.get("step_graphs") or []
    settled = _first_after_warmup(counts) + SETTLED_STEP - 1
    if not 0 < settled < len(counts):
        return None
    before, last = counts[settled - 1], counts[-1]
    replays, eager = (last[name] - before[name] for name in ("replays", "eager"))
    return replays / (replays + eager) if replays + eager else None


def _first_after_warmup(counts: list[dict[str, Any]]) -> int:
    """Return the index of the first step in which something was replayed or ran eager for a reason."""
    return next((number for number, count in enumerate(counts) if count["replays"] + count["eager"]), len(counts))
