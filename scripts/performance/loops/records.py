"""Records of loops: what runs wrote of their rounds, beside eager ones."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bridge_cg_plugin.cli.report.runs import GIB
from bridge_cg_plugin.cli.report.spread import compare_to_spread
from scripts.performance.loops.rounds import FIRST, OLD, PASSES, REFERENCE

FEWEST_EAGER_RUNS = 2  # that have a spread

Rounds = Sequence[Mapping[str, Any]]


def record_of(
    run: Mapping[str, Any],
    eager: Sequence[Mapping[str, Any]] = (),
    same_rows: Mapping[str, Any] | None = None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Return the fields of a record that a run gives, beside eager ones.

    Args:
        run: What its process wrote.
        eager: What eager runs wrote, the timed one first; empty for itself.
        same_rows: What an eager run wrote that computes as many rows; None while there is none.
        deterministic: Whether training is compared with that run's to the bit.
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
        **switches(rounds),
        **encoder_times(rounds),
    }
    if run["graphs"]:
        found |= graph_figures(run)
    if eager:
        found |= beside(found, rounds, eager)
    if eager and same_rows is not None:
        found["bit_equal"] &= log_prob_differences(rounds[:1], same_rows["rounds"][:1]) == [0.0]
        if deterministic:
            found["training_equal"] = _trained_alike(rounds, same_rows["rounds"])
    return found


def pass_times(rounds: Rounds) -> dict[str, float]:
    """Return the median ms of each pass in all rounds but the first ones, without recordings."""
    late = _late(rounds)
    return {
        name: median(each["passes"][name]["ms"] - 1e3 * each["passes"][name]["capture_s"] for each in late)
        for name in PASSES
    }


def encoder_times(rounds: Rounds) -> dict[str, float]:
    """Return the median ms of the encoder in a round, of all passes; nothing where it was not taken."""
    late = [[each["passes"][name]["encoder_ms"] for name in PASSES] for each in _late(rounds)]
    return {} if any(None in taken for taken in late) else {"encoder_ms": median(map(sum, late))}


def switches(rounds: Rounds) -> dict[str, Any]:
    """Return what happened while weights left and came back, nothing where they stay.

    Device memory taken since all was built, looked at while all is away, its growth over the timed rounds, in how many
    rounds parameters moved, and whether memory that somebody else took was left alone.
    """
    away = [each["away_gb"] for each in _late(rounds) if each["away_gb"] is not None]
    looked = [each["canary_intact"] for each in rounds if each["canary_intact"] is not None]
    if not looked:
        return {}
    return {
        "switches": len(rounds),
        "moves": sum(each["moved"] for each in rounds),
        "canary_intact": all(looked),
        **({"away_gb": away[-1], "growth_gb": away[-1] - away[0]} if away else {}),
    }


def graph_figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return shares on graphs, recordings and memory of a run with graphs."""
    late, parts = _late(run["rounds"]), run["parts"]
    moved = [each for each in late if each["moved"]]
    return {
        "graph_share": share_on_graphs(late, parts),
        **({"graph_share_moved": min(share_on_graphs([each], parts) for each in moved)} if moved else {}),
        "recapture_s": [sum(found["capture_s"] for found in each["passes"].values()) for each in late],
        "with_captures_ms": sum(found["ms"] for each in late for found in each["passes"].values()) / len(late),
        "capture_s": float(sum(each["capture_seconds"] for each in run["graphs"])),
        "memory_gb": sum(each["memory_bytes"] for each in run["graphs"]) / GIB,
        "all_graphs": list(run["graphs"]),
        **({"encoded_before": run["kept"]} if run.get("kept") else {}),
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
        "pass_ratios": {name: own["passes_ms"][name] / times[name] for name in PASSES},
        "log_prob_diff": log_prob_differences(rounds, first),
    }
    if "away_gb" in own and "away_gb" in (there := switches(first)):
        found["graphs_away_gb"] = own["away_gb"] - there["away_gb"]
    encoder = encoder_times(first)
    if encoder and "encoder_ms" in own:
        found["encoder_ratio"] = own["encoder_ms"] / encoder["encoder_ms"]
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


def _trained_alike(rounds: Rounds, others: Rounds) -> bool:
    """Whether losses and gradient norms are the same in the rounds that both made."""
    names = ("loss", "grad_norm")
    return all(one[name] == other[name] for one, other in zip(rounds, others, strict=False) for name in names)


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
