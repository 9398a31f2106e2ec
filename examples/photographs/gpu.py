"""The main job on a GPU: `pretrain()` eager several times and with vision graphs once, each in a process of its own."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge_cg_tools.benchmarks.photographs.arguments import layout_in
from bridge_cg_tools.benchmarks.photographs.comparison import compare
from bridge_cg_tools.benchmarks.runs.layout import Layout
from bridge_cg_tools.benchmarks.runs.processes import TrainingProcess

# Eager runs that share the GPU at a time; one takes up to 43 GiB.
AT_ONCE = 2


def run_eager(processes: Sequence[TrainingProcess], side_by_side: bool, arguments: list[str]) -> list[dict[str, Any]]:
    """Train eager in each process; side by side, only the first, which runs alone, keeps its step times."""
    if not side_by_side:
        return [process.train("eager", arguments) for process in processes]
    first = processes[0].train("eager", arguments)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        others = list(pool.map(lambda process: process.train("eager", arguments), processes[1:]))
    return [first, *({**run, "step_ms": None} for run in others)]


def main(
    steps: int,
    eager_runs: int,
    arguments: list[str],
    records: Path | None = None,
    side_by_side: bool = False,
    also: Sequence[str] = (),
) -> int:
    """Run all, print the comparisons, return the exit status.

    Args:
        steps: Optimizer steps of each run.
        eager_runs: Eager runs that make the spread.
        arguments: Command line of each run.
        records: File for benchmark records.
        side_by_side: Whether eager runs after the first share the GPU.
        also: Further graphed runs against the same eager ones, each by the overrides it adds, apart by blanks.
    """
    variants = [arguments, *([*arguments, *words.split()] for words in also)]
    with started(eager_runs + len(variants), layout_in(arguments)) as processes:
        eager = run_eager(processes[:eager_runs], side_by_side, arguments)
        graphed = zip(processes[eager_runs:], variants, strict=True)
        same = [compare(eager, process.train("graphs", words), words, steps, records) for process, words in graphed]
    return 0 if all(same) else 1


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
