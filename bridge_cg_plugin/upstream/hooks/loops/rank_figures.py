"""The graphs of all ranks of a job: their figures on every rank, and what this rank does with its own."""

from collections.abc import Sequence
from typing import Any

from torch import distributed

from ....announce import announce
from ....graphs.manager import GraphManager
from ....graphs.reports.report import merge_statistics, pause_metrics, render_ranks, render_steps
from ....graphs.reports.statistics import RegionStatistics
from ...parallel.watchdog import several_ranks
from ..helpers.graph_helper import GraphHelper, asks_for_graphs

# Group of the figures of all modules together.
ALL_MODULES = "cuda_graph"


def statistics_of_ranks(modules: Sequence[GraphManager], config: Any) -> dict[str, dict[int, RegionStatistics]]:
    """Return every rank's statistics by its number, by the name that loggers give a module's figures.

    All ranks call it together, those without graphs too: the rank that has loggers may be one without an encoder. Where
    the configuration asks for no graphs nothing is exchanged.

    Args:
        modules: This rank's modules.
        config: The model provider, alike on all ranks.
    """
    parts: dict[str, list[RegionStatistics]] = {}
    for module in modules:
        parts.setdefault(module.workload.group, []).append(module.statistics())
    own = {group: merge_statistics(found) for group, found in parts.items()}
    ranks: list[Any] = [own]
    if several_ranks() and asks_for_graphs(config):
        ranks = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own)
    groups = dict.fromkeys(group for rank in ranks for group in rank)
    return {group: {n: rank[group] for n, rank in enumerate(ranks) if group in rank} for group in groups}


def pauses_of_ranks(found: dict[str, dict[int, RegionStatistics]]) -> list[RegionStatistics]:
    """Return for each rank the statistics of all its modules together: a step waits for the recordings of all."""
    ranks = sorted({rank for group in found.values() for rank in group})
    return [merge_statistics([group[rank] for group in found.values() if rank in group]) for rank in ranks]


class Figures:
    """Reports of all ranks: short ones while training, and one from the last figures that were exchanged.

    At the end of training no rank may wait for another. Short reports come with the first logged step after warm-up,
    then with one in about a hundred steps.
    """

    EVERY = 100

    def __init__(self) -> None:
        self._step = 0
        self._found: dict[str, dict[int, RegionStatistics]] = {}
        # Of each group, the step of its last short report and the sum of its figures then.
        self._told: dict[str, tuple[int, RegionStatistics]] = {}

    def take(self, step: int, found: dict[str, dict[int, RegionStatistics]]) -> None:
        """Keep what was exchanged after a step that was logged; prints what happened since the last report, if due.

        Args:
            step: The step.
            found: Statistics of all ranks after it; see `statistics_of_ranks`.
        """
        self._step, self._found = step, found
        for group, ranks in found.items():
            last, before = self._told.get(group, (0, RegionStatistics()))
            if step < last:  # of another training in this process
                last, before = 0, RegionStatistics()
            if last and step - last < self.EVERY:
                continue
            if said := render_steps(list(ranks.values()), before, f"{group}, steps {last + 1} to {step}"):
                self._told[group] = step, merge_statistics(list(ranks.values()))
                announce(said)

    def end(self) -> None:
        """Print a table of the ranks for each group that has several, and forget all: training has ended."""
        for group, ranks in self._found.items():
            if len(ranks) > 1:
                announce(render_ranks(ranks, f"{group} of {len(ranks)} ranks after step {self._step}"))
        if len(self._found) > 1:
            waited = pause_metrics(pauses_of_ranks(self._found), ALL_MODULES)
            in_all, most = waited[f"{ALL_MODULES}/pause_s"], waited[f"{ALL_MODULES}/longest_pause_s"]
            announce(f"steps waited {in_all:.1f} s for recordings of all modules, at most {most:.1f} s in one step")
        self._found, self._told = {}, {}


def phase_of(helpers: Sequence[GraphHelper]) -> str:
    """Return what steps are doing now with this rank's graphs."""
    if not helpers:
        return "no graphs on this rank"
    if any(helper.graphs is not None and helper.graphs.failure is not None for helper in helpers):
        return "eager after a failed capture"
    return "with graphs" if any(helper.graphs_created() for helper in helpers) else "warming up"
