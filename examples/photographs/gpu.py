"""The main job on a GPU: `pretrain()` eager several times and with vision graphs once, each in a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from examples.photographs.arguments import layout_in
from examples.photographs.comparison import compare
from examples.photographs.layout import Layout
from examples.photographs.processes import TrainingProcess


def main(steps: int, eager_runs: int, arguments: list[str]) -> int:
    """Run all, print the comparison, return the exit status.

    Args:
        steps: Optimizer steps of each run.
        eager_runs: Eager runs that make the spread.
        arguments: Command line of each run.
    """
    with started(eager_runs + 1, layout_in(arguments)) as (graphed, *others):
        eager = [process.train("eager", arguments) for process in others]
        same = compare(eager, graphed.train("graphs", arguments), steps)
    return 0 if same else 1


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
