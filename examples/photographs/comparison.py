"""Eager runs and a graphed one beside each other: lines to read and a verdict."""

import json
import statistics
from typing import Any

from bridge_cg_plugin.cli.report.runs import compare_to_spread, how_eager_fares

# Steps whose times do not count: warm-up, capture, the first replays.
SKIPPED = 6


def median_ms(run: dict[str, Any]) -> float:
    """Return the median step time after warm-up."""
    return float(statistics.median(run["step_ms"][SKIPPED:]))


def compare(eager: list[dict[str, Any]], graphs: dict[str, Any], steps: int) -> bool:
    """Print the comparison of a graphed run with eager ones, and return whether both train the same."""
    print_steps([*eager, graphs], steps)
    losses, norms = ([run[name] for run in eager] for name in ("losses", "grad_norms"))
    loss, norm = compare_to_spread(losses, graphs["losses"]), compare_to_spread(norms, graphs["grad_norms"])
    if steps > SKIPPED:
        eager_ms, ms = min(map(median_ms, eager)), median_ms(graphs)
        print(f"step time: eager {eager_ms:.1f} ms, graphs {ms:.1f} ms, ratio {ms / eager_ms:.3f}")
    print(f"peak memory allocated: eager {peaks(eager[0])}, graphs {peaks(graphs)}")
    print(f"graphs: {json.dumps(graphs['graphs'])}")
    whole = graphs.get("language_model_graphs")
    if whole is not None:
        print(f"graphs of the language model's layers: {json.dumps(whole)}")
    parts = [part for part in (graphs["graphs"], whole) if part is not None]
    replayed = bool(parts) and all(part["replays"] for part in parts)
    same = loss.inside and norm.inside and replayed
    print(
        f"verdict: {'SAME' if same else 'DIFFERENT'} (largest distance over allowance: loss {loss.worst:.2f} at step "
        f"{loss.step}, gradient norm {norm.worst:.2f} at step {norm.step}; replays: {replayed})"
    )
    if not (loss.inside and norm.inside):
        print(how_eager_fares(losses, norms))
    return same


def peaks(run: dict[str, Any]) -> str:
    """Return a run's peak memory, rank by rank where there are several."""
    return "/".join(f"{rank['peak_gb']:.1f}" for rank in run.get("ranks", [run])) + " GiB"


def print_steps(runs: list[dict[str, Any]], steps: int) -> None:
    """Print losses and gradient norms of all runs side by side; the last run is the graphed one."""
    names = [*(f"eager {i + 1}" for i in range(len(runs) - 1)), "graphs"]
    print(f"{'step':>4} " + " ".join(f"{name:>11}" for name in names) + "   gradient norms in the same order")
    for step in range(steps):
        losses = " ".join(f"{r['losses'][step]:>11.6f}" for r in runs)
        norms = " ".join(f"{r['grad_norms'][step]:>9.4f}" for r in runs)
        print(f"{step:>4} {losses}   {norms}")
