"""Training on packed documents: the eager runs, the graphed one and their comparison."""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bridge_cg_plugin.cli.report.spread import compare_to_spread
from bridge_cg_plugin.cli.runs.results import provenance, put_record
from scripts.performance.processes import TrainingProcess

MODULE = "scripts.performance.packed.training"
# Case of the records by model.
CASES = {
    "dense": "in_batch",
    **{
        model: f"{model}_in_batch"
        for model in ("experts", "fp8", "fp8_blockwise", "fp8_delayed", "fp8_parameters", "mamba", "qwen3_vl")
    },
}
# Runs by name, with the multiple of tokens that packs are padded to.
EAGER_RUNS = {"eager": 1, "eager_again": 1, "eager_64": 64, "eager_256": 256}
# Seconds that a run has.
LIMIT_S = 180.0
# Steps whose times do not count: warm-up, capture, the first replays.
SKIPPED = 6


def train_all(steps: int, model: str, modules: str, side_by_side: bool = False) -> dict[str, dict[str, Any]]:
    """Do every run in a process of its own and return their figures by name; the graphs' come last.

    What a run writes is shown if it fails.

    Args:
        steps: Of every run.
        model: Of `CASES`.
        modules: Parts of layers to capture, joined by commas.
        side_by_side: Whether all runs share the GPU; otherwise those that are timed come first, one by one.
    """
    all_words = ["--steps", str(steps), "--model", model]
    words = {name: [*all_words, "--rows", str(rows)] for name, rows in EAGER_RUNS.items()}
    timed = () if side_by_side else (next(iter(words)), "plugin")
    words["plugin"] = [*all_words, "--modules", modules]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        processes = {name: TrainingProcess(folder / f"{name}.log", module=MODULE) for name in words}
        for process in processes.values():
            stack.callback(process.close)
        for process in processes.values():
            process.wait_until_ready()

        def train(name: str) -> dict[str, Any]:
            return processes[name].train("graphs" if name == "plugin" else "eager", words[name], LIMIT_S)

        runs = {name: train(name) for name in timed}
        others = [name for name in words if name not in timed]
        with ThreadPoolExecutor(len(others)) as pool:
            found = pool.map(train, others)
            runs |= {name: {**run, "step_ms": None} for name, run in zip(others, found, strict=True)}
    return {name: runs[name] for name in words}


def compare(runs: dict[str, dict[str, Any]], steps: int, out: Path, case: str = CASES["dense"]) -> int:
    """Print and write the comparison; non-zero if graphs train another model or nothing was replayed."""
    *eager, graphs = runs.values()
    spreads = {name: compare_to_spread([run[name] for run in eager], graphs[name]) for name in ("losses", "grad_norms")}
    times = {name: _median_ms(run) for name, run in runs.items()}
    base = times[next(iter(runs))]
    same = all(spread.inside for spread in spreads.values()) and graphs["packed_graphs"]["replays"] > 0
    for name, figures in runs.items():
        record = {
            "case": case,
            "mode": name,
            "ms": times[name],
            "inside_spread": same if name == "plugin" else None,
            **{field: value for field, value in figures.items() if field != "step_ms"},
            **provenance(steps - SKIPPED, 1234),
        }
        ms = times[name]
        if base is not None and ms is not None:
            record["ratio"] = ms / base
        put_record(out, record)
    for step, losses in enumerate(zip(*(figures["losses"] for figures in runs.values()), strict=True)):
        print(f"{step:>4} " + " ".join(f"{loss:>11.6f}" for loss in losses))
    print(f"graphs: {json.dumps(graphs['packed_graphs'])}")
    ours = times["plugin"]
    if base is not None and ours is not None:
        print(f"step time: eager {base:.1f} ms, graphs {ours:.1f} ms, {base / ours:.2f} times as fast")
    worst = ", ".join(f"{name} {spread.worst:.2f} at step {spread.step}" for name, spread in spreads.items())
    print(f"verdict: {'SAME' if same else 'DIFFERENT'} (largest distance over allowance: {worst})")
    return 0 if same else 1


def _median_ms(run: dict[str, Any]) -> float | None:
    return statistics.median(run["step_ms"][SKIPPED:]) if run["step_ms"] else None
