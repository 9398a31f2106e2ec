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
from bridge_cg_tools.report.spread import outside_by_others

# Eager runs that share the GPU at a time; one takes up to 43 GiB.
AT_ONCE = 2
# Eager runs that can be judged by the others, and that a verdict may rest on.
FEWEST_JUDGED, MOST_EAGER = 3, 7


def run_eager(processes: Sequence[TrainingProcess], side_by_side: bool, arguments: list[str]) -> list[dict[str, Any]]:
    """Train eager in each process; side by side, only the first, which runs alone, keeps its step times."""
    if not side_by_side:
        return [process.train("eager", arguments) for process in processes]
    return [processes[0].train("eager", arguments), *untimed(processes[1:], arguments)]


def untimed(processes: Sequence[TrainingProcess], arguments: list[str]) -> list[dict[str, Any]]:
    """Train eager in processes that share the GPU."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
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
        eager = run_eager(processes[:eager_runs], side_by_side, arguments)
        rest = zip(processes[eager_runs:], variants, strict=True)
        graphed = [(process.train("graphs", words), words) for process, words in rest]
    while True:
        same = [compare(eager, run, words, steps, records) for run, words in graphed]
        replayed = all(run["graphs"] and run["graphs"]["replays"] for run, _ in graphed)
        if all(same) or not (replayed and say_too_little(eager)):
            return 0 if all(same) else 1
        print(f"{AT_ONCE} more eager runs, since {len(eager)} do not show how far eager runs are apart", flush=True)
        with started(AT_ONCE, layout_in(arguments)) as processes:
            eager += untimed(processes, arguments) if side_by_side else run_eager(processes, False, arguments)


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
