"""The main job on a GPU: `pretrain()` eager several times and with vision graphs once, each in a process of its own."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bridge_cg_plugin.cli.report.spread import outside_by_others
from scripts.performance.photographs.arguments import layout_in
from scripts.performance.photographs.comparison import compare
from scripts.performance.runs.layout import Layout
from scripts.performance.runs.processes import TrainingProcess

# What one run takes of a GPU's memory, and how many share it at least.
RUN_BYTES, FEWEST_AT_ONCE = 45 << 30, 2
# Eager runs that can be judged by the others, and that a verdict may rest on.
FEWEST_JUDGED, MOST_EAGER = 3, 7
MORE_EAGER = 2


def at_once() -> int:
    """Return how many runs share the GPU at a time."""
    return max(torch.cuda.get_device_properties(0).total_memory // RUN_BYTES, FEWEST_AT_ONCE)


def run_eager(processes: Sequence[TrainingProcess], side_by_side: bool, arguments: list[str]) -> list[dict[str, Any]]:
    """Train eager in each process; side by side they share the GPU and keep no step times."""
    if not side_by_side:
        return [process.train("eager", arguments) for process in processes]
    with ThreadPoolExecutor(at_once()) as pool:
        runs = list(pool.map(lambda process: process.train("eager", arguments), processes))
    return [{**run, "step_ms": None} for run in runs]


def main(
    steps: int,
    eager_runs: int,
    arguments: list[str],
    records: Path | None = None,
    side_by_side: bool = False,
    also: Sequence[list[str]] = (),
) -> int:
    """Run all, print the comparisons, return the exit status.

    Args:
        steps: Optimizer steps of each run.
        eager_runs: Eager runs that make the spread.
        arguments: Command line of each run.
        records: File for benchmark records.
        side_by_side: Whether eager runs after the first share the GPU.
        also: Further graphed runs against the same eager ones, each by the overrides it adds.

    A graphed run outside the spread of eager ones that are outside each other's as well says nothing: there are more
    eager runs then, and another verdict.
    """
    variants = [arguments, *([*arguments, *words] for words in also)]
    with started(eager_runs + len(variants), layout_in(arguments)) as processes:
        first, others, rest = processes[0], processes[1:eager_runs], processes[eager_runs:]
        eager = [first.train("eager", arguments)]
        graphed = [(process.train("graphs", words), words) for process, words in zip(rest, variants, strict=True)]
        eager += run_eager(others, side_by_side, arguments)
    while True:
        same = [compare(eager, run, words, steps, records) for run, words in graphed]
        replayed = all(run["graphs"] and run["graphs"]["replays"] for run, _ in graphed)
        if all(same) or not (replayed and say_too_little(eager)):
            return 0 if all(same) else 1
        print(f"{MORE_EAGER} more eager runs, since {len(eager)} do not show how far eager runs are apart", flush=True)
        with started(MORE_EAGER, layout_in(arguments)) as processes:
            eager += run_eager(processes, side_by_side, arguments)


def say_too_little(eager: Sequence[dict[str, Any]]) -> bool:
    """Whether eager runs, judged as a graphed one is, are outside as well, and there may be more of them."""
    if not FEWEST_JUDGED <= len(eager) < MOST_EAGER:
        return False
    return outside_by_others(*([run[name] for run in eager] for name in ("losses", "grad_norms"))) > 0


@contextmanager
def started(count: int, layout: Layout) -> Iterator[list[TrainingProcess]]:
    """Start the processes of runs side by side; those that were not used end here."""
    processes = [TrainingProcess(ranks=layout.ranks) for _ in range(count)]
    try:
        for process in processes:
            process.wait_until_ready()
        yield processes
    finally:
        for process in processes:
            process.close()
