"""Eager runs and a graphed one beside each other: lines to read, a verdict and records."""

import json
import statistics
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.spread import compare_to_spread, how_eager_fares
from bridge_cg_plugin.cli.runs.results import provenance, read_records, write_records
from scripts.performance.photographs.arguments import layout_in
from scripts.performance.photographs.coverage import first_graphed_s, settled_graph_share

# Steps whose times do not count: warm-up, capture, the first replays.
SKIPPED = 6
# How many of the longest steps are named.
LONGEST = 12


def median_ms(run: dict[str, Any]) -> float | None:
    """Return the median step time after warm-up, None for a run that was not timed."""
    return statistics.median(run["step_ms"][SKIPPED:]) if run["step_ms"] else None


def longest(step_ms: list[float]) -> str:
    """Return the longest steps, which waited for recordings, in words."""
    numbers = sorted(range(len(step_ms)), key=step_ms.__getitem__)[-LONGEST:]
    return ", ".join(f"{number}: {step_ms[number] / 1e3:.1f}" for number in sorted(numbers))


def compare(
    eager: list[dict[str, Any]],
    graphs: dict[str, Any],
    arguments: list[str],
    steps: int,
    records: Path | None,
    case: str | None = None,
) -> bool:
    """Print the comparison of a graphed run with eager ones, record it, and return whether both train the same.

    The case's name in records is that which the arguments make unless it is given.
    """
    case = case or case_of(arguments)
    print_steps([*eager, graphs], steps)
    losses, norms = ([run[name] for run in eager] for name in ("losses", "grad_norms"))
    loss, norm = compare_to_spread(losses, graphs["losses"]), compare_to_spread(norms, graphs["grad_norms"])
    print(f"case: {case}")
    ratio, ms = None, median_ms(graphs)
    if ms is not None:
        eager_ms = min(each for each in map(median_ms, eager) if each is not None)
        ratio = ms / eager_ms
        times = f"eager {eager_ms:.1f} ms, graphs {ms:.1f} ms"
        print(f"step time: {times}, ratio {ratio:.3f}, {1 / ratio:.2f}x")
        print(f"longest steps of graphs, as step: seconds: {longest(graphs['step_ms'])}")
    for name, value in coverage_of(graphs).items():
        print(f"{name}: {value:.3f}")
    print(f"peak memory allocated: eager {peaks(eager[0])}, graphs {peaks(graphs)}")
    print(f"graphs: {json.dumps(graphs['graphs'])}")
    print(f"language-model layers on graphs: {graphs.get('language_model_layers', 0)}")
    whole = graphs.get("language_model_graphs")
    if whole is not None:
        print(f"steps whose every microbatch replayed the whole language model: {whole['replayed_steps']} of {steps}")
    parts = [part for part in (graphs["graphs"], whole) if part is not None]
    replayed = bool(parts) and all(part["replays"] for part in parts)
    same = loss.inside and norm.inside and replayed
    print(
        f"verdict: {'SAME' if same else 'DIFFERENT'} (largest distance over allowance: loss {loss.worst:.2f} at step "
        f"{loss.step}, gradient norm {norm.worst:.2f} at step {norm.step}; replays: {replayed})"
    )
    if not (loss.inside and norm.inside):
        print(how_eager_fares(losses, norms))
    if records is not None:
        runs = {**{f"eager{i + 1}": run for i, run in enumerate(eager)}, "graphs": graphs}
        write(records, runs, ratio, same, case)
    return same


def case_of(arguments: list[str]) -> str:
    """Return the name of the case that a run's arguments make, for its records."""
    words = [a.removeprefix("model.") for a in arguments]
    layout = layout_in(arguments)
    where = f"_{layout}" if layout.ranks > 1 else ""
    graphs = [word for word in words if word.startswith("cuda_graph_")]
    kind = "_full_iteration" if any("full_iteration" in word for word in graphs) else "_language_model"
    return ("single" if "--single" in arguments else "mixed") + (kind if graphs else "") + where


def coverage_of(run: dict[str, Any]) -> dict[str, float]:
    """Return the record's fields that say how soon and how far a run was on graphs, as far as that is known."""
    found = {"first_graphed_s": first_graphed_s(run), "settled_graph_share": settled_graph_share(run)}
    return {name: value for name, value in found.items() if value is not None}


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


def write(path: Path, runs: dict[str, dict[str, Any]], ratio: float | None, same: bool, case: str) -> None:
    """Write the runs as benchmark records."""
    origin = provenance(max(len(runs["graphs"]["step_ms"]) - SKIPPED, 0), 1234)
    release = origin["versions"]["megatron-bridge"]
    kept = [r for r in read_records(path) if (r["case"], r["versions"]["megatron-bridge"]) != (case, release)]
    for name, run in runs.items():
        graphed = name == "graphs"
        record = {
            "case": case,
            "mode": "plugin" if graphed else name,
            "ms": median_ms(run),
            "ratio": ratio if graphed else 1.0,
            "losses": run["losses"],
            "grad_norms": run["grad_norms"],
            "inside_spread": same if graphed else None,
            "peak_gb": run["peak_gb"],
            "graphs": run["graphs"],
            **coverage_of(run),
            **origin,
        }
        if "ranks" in run:
            record["rank_peak_gb"] = [rank["peak_gb"] for rank in run["ranks"]]
        kept.append(record)
    write_records(path, kept)
