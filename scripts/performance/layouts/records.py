"""The records of bench_parallel.py: what the runs of a layout found, beside each other."""

from collections.abc import Sequence
from typing import Any

from bridge_cg_plugin.graphs.reports.report import imbalance_of_steps
from examples.photographs.comparison import SKIPPED, compare, median_ms
from scripts.performance.layouts.jobs import SLOTS, Job
from scripts.performance.processes import TrainingFailed

MOST_GROWTH = 0.02  # of what graphs take, with more microbatches
SEED = 1234

Run = dict[str, Any]


class Writer:
    """Makes records of runs.

    Args:
        small: Whether the tower is small.
        origin: Where and how all are measured, but for repeats.
    """

    def __init__(self, small: bool, origin: dict[str, Any]) -> None:
        self._small, self._common = small, origin

    def trained(self, runs: dict[Job, Run]) -> tuple[list[dict[str, Any]], bool]:
        """Return the records of a layout's eager and graphed runs, and whether graphs trained the same."""
        eager = [run for job, run in runs.items() if job.told == "eager"]
        same = {
            job: compare(eager, run, job.words(self._small), job.steps, None)
            for job, run in runs.items()
            if job.told != "eager"
        }
        eager_ms = median_ms(eager[0])
        records = []
        for job, run in sorted(runs.items(), key=lambda pair: pair[0].mode):
            ms = median_ms(run)
            repeats = max(len(run["step_ms"] or ()) - SKIPPED, int(job.shared))
            record = {**self._origin(job, repeats), "ms": ms, "losses": run["losses"]}
            record |= {"grad_norms": run["grad_norms"], "peak_gb": run["peak_gb"], "graphs": run["graphs"]}
            record |= {**of_ranks(run.get("ranks", [run])), "inside_spread": same.get(job)}
            records.append(record | ({"ratio": ms / eager_ms} if ms is not None and eager_ms else {}))
        return records, all(same.values())

    def slots(self, runs: dict[Job, Run]) -> tuple[list[dict[str, Any]], bool]:
        """Return the records of what graphs take, and whether they take as much with more microbatches."""
        records, taken = [], []
        for job, run in runs.items():
            graphs = run["graphs"]
            taken.append(graphs["memory_bytes"])
            found = {"memory_gb": taken[-1] / 2**30, "replays": graphs["replays"], "graphs": graphs}
            records.append({**self._origin(job, 1), "ms": None, **found})
            print(f"{job}: graphs take {taken[-1] / 2**30:.3f} GiB", flush=True)
        return records, max(taken) <= (1 + MOST_GROWTH) * min(taken)

    def failed(self, job: Job, error: TrainingFailed) -> dict[str, Any]:
        """Return the record of a run that failed."""
        said = str(error).strip().splitlines()
        return {**self._origin(job, 0), "error": f"{said[0]}: {said[-1]}"[:300]}

    def _origin(self, job: Job, repeats: int) -> dict[str, Any]:
        case = f"{job.layout}{'_small' if self._small else ''}".replace(" ", "_")
        case += "_shared" if job.shared else ""
        case += f"_{job.microbatches}_microbatches" if job.mode == SLOTS else ""
        sharing = {"ranks_per_gpu": job.sharing} if job.shared else {}
        fields = {"case": case, "mode": job.mode, "microbatches": job.microbatches, **sharing}
        return {**fields, **self._common, "repeats": repeats}


def of_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a record's fields of each rank: peak memory in GiB; of those that have graphs replays and fallbacks.

    Of replicas it has the most tokens of one over their mean as well, in the last steps.
    """
    graphs = [rank["graphs"] for rank in ranks if rank["graphs"] is not None]
    tokens = [rank["step_tokens"] for rank in ranks if rank.get("step_tokens")]
    imbalance = imbalance_of_steps(tokens)
    return {
        **({"token_imbalance": imbalance} if len(tokens) > 1 and imbalance else {}),
        "rank_peak_gb": [rank["peak_gb"] for rank in ranks],
        "rank_replays": [each["replays"] for each in graphs],
        "rank_fallbacks": [sum(each["fallbacks"].values()) for each in graphs],
    }
