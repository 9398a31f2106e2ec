"""Records of loops: what runs wrote of their rounds, beside eager ones."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bridge_cg_plugin.cli.report.runs import GIB, compare_to_spread
from scripts.performance.loops.rounds import FIRST, OLD, PASSES, REFERENCE

FEWEST_EAGER_RUNS = 2  # that have a spread

Rounds = Sequence[Mapping[str, Any]]


def record_of(
    run: Mapping[str, Any], eager: Sequence[Mapping[str, Any]] = (), same_rows: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of a record that a run gives, beside eager ones.

    Args:
        run: What its process wrote.
        eager: What eager runs wrote, the timed one first; empty for itself.
        same_rows: What an eager run wrote that computes as many rows; None while there is none.
    """
    rounds = run["rounds"]
    times = pass_times(rounds)
    found = {
        "ms": sum(times.values()),
        "passes_ms": times,
        "losses": [each["loss"] for each in rounds],
        "grad_norms": [each["grad_norm"] for each in rounds],
        "microbatches": sum(each["microbatches"] for each in rounds),
        "bit_equal": all(each["bit_equal"] for each in rounds),
        "peak_gb": max(each["peak_gb"] for each in rounds),
        **memory_away(rounds),
    }
    if run["graphs"]:
        found |= graph_figures(run)
    if eager:
        found |= beside(found, rounds, eager)
    if eager and same_rows is not None:
        found["bit_equal"] &= log_prob_differences(rounds[:1], same_rows["rounds"][:1]) == [0.0]
    return found


def pass_times(rounds: Rounds) -> dict[str, float]:
    """Return the median ms of each pass in all rounds but the first ones, without recordings."""
    late = _late(rounds)
    return {
        name: median(each["passes"][name]["ms"] - 1e3 * each["passes"][name]["capture_s"] for each in late)
        for name in PASSES
    }


def memory_away(rounds: Rounds) -> dict[str, float]:
    """Return device memory taken since all was built while all is away, and its growth over the timed rounds."""
    away = [each["away_gb"] for each in _late(rounds) if each["away_gb"] is not None]
    return {"away_gb": away[-1], "growth_gb": away[-1] - away[0]} if away else {}


def graph_figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return shares on graphs, recordings and memory of a run with graphs."""
    late, parts = _late(run["rounds"]), run["parts"]
    return {
        "graph_share": share_on_graphs(late, parts),
        "recapture_s": [sum(found["capture_s"] for found in each["passes"].values()) for each in late],
        "capture_s": float(sum(each["capture_seconds"] for each in run["graphs"])),
        "memory_gb": sum(each["memory_bytes"] for each in run["graphs"]) / GIB,
    }


def share_on_graphs(rounds: Rounds, parts: int) -> float:
    """Return the share of all microbatches that ran on graphs, of each of so many parts of a model."""
    asked = parts * sum(each["microbatches"] * len(each["passes"]) for each in rounds)
    return float(sum(found["replays"] for each in rounds for found in each["passes"].values()) / asked)


def beside(own: Mapping[str, Any], rounds: Rounds, eager: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how a run compares with eager ones, the first of which was timed."""
    first = eager[0]["rounds"]
    times = pass_times(first)
    found: dict[str, Any] = {
        "ratio": own["ms"] / sum(times.values()),
        "log_prob_diff": log_prob_differences(rounds, first),
    }
    if len(eager) >= FEWEST_EAGER_RUNS:
        others = [each["rounds"] for each in eager]
        found["inside_spread"] = all(inside_spread(rounds, others, name) for name in ("loss", "grad_norm"))
        found["log_prob_noise"] = log_prob_differences(others[1], first)
    return found


def log_prob_differences(rounds: Rounds, others: Rounds) -> list[float]:
    """Return the largest difference of a token's log-probability, old or reference, in each round of both.

    Raises:
        ValueError: The runs had other tokens.
    """
    found = []
    for one, other in zip(rounds, others, strict=False):
        pairs = [
            pair
            for name in (OLD, REFERENCE)
            for pair in zip(one["log_probs"][name], other["log_probs"][name], strict=True)
        ]
        differences = [abs(a - b) for a, b in pairs]
        # A NaN would be lost in max().
        found.append(math.nan if any(map(math.isnan, differences)) else max(differences))
    return found


def inside_spread(rounds: Rounds, others: Sequence[Rounds], name: str) -> bool:
    """Whether a figure of a run stays inside the spread of eager ones, in the rounds that all made."""
    length = min(len(run) for run in (rounds, *others))
    *eager, own = ([each[name] for each in run[:length]] for run in (*others, rounds))
    return compare_to_spread(eager, own).inside


def _late(rounds: Rounds) -> Rounds:
    return rounds[FIRST:] if len(rounds) > FIRST else rounds[-1:]


def in_words(record: Mapping[str, Any]) -> str:
    """Return one line of a record for a person."""
    name = f"{record['case']} {record['mode']}"
    if "error" in record:
        return f"{name}: {record['error']}"
    ratio = f", {record['ratio']:.3f} of eager" if "ratio" in record else ""
    passes = ", ".join(f"{key} {value:.1f}" for key, value in record["passes_ms"].items())
    return f"{name}: {record['ms']:.1f} ms ({passes}){ratio}"
