"""Train over several GPUs, eager twice and with vision graphs once, and write what came out as records.

    python scripts/performance/bench_parallel.py --small --microbatches 2
    torchrun --standalone --nproc_per_node 4 scripts/performance/bench_parallel.py --small --layouts TP2xPP2 DP4

Every layout takes as many microbatches a step for each replica of the model, so DP2 and DP4 against one GPU are weak
scaling, and the others share one GPU's work. Runs share the GPUs: set-up, warm-up and steps that are not timed go side
by side, and for the steps that are timed, some of the first eager and the graphed run, a run has its GPUs to itself.
Set-up waits for these steps too. With --untimed no run has.

With --ranks-per-gpu 2 layouts of more ranks than there are GPUs are trained as well, two ranks on each GPU and with a
narrower language model. Losses, memory and slots are what they are with a GPU for each rank; times are not taken.

--slots trains layouts with graphs for a few steps of 8 and of 32 microbatches: graphs must take as much memory with
these as with those.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import batched
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs import gpu  # noqa: E402
from examples.photographs.hosts import ranks_per_gpu  # noqa: E402
from examples.photographs.layout import Layout  # noqa: E402
from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.layout_runs import (  # noqa: E402
    LAYERS,
    LAYOUTS,
    MODES,
    MUST,
    SHARED_WIDTH,
    SHARED_WORDS,
    SLOTS,
    SLOTS_MICROBATCHES,
    SLOTS_STEPS,
    SLOTS_WORDS,
    TIMED,
    WIDTH,
    Job,
    in_order,
)
from scripts.performance.places import Places  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

MOST_RANKS_PER_GPU = 4
MOST_GROWTH = 0.02  # of what graphs take, with more microbatches
# Runs that share a GPU, small ones and others: their memory has to fit.
BESIDE = {True: 6, False: 3}


def main(words: Sequence[str] | None = None) -> int:
    """Run the layouts and write records; returns 0 if graphs stayed inside eager's spread in all of them."""
    args = parse(words)
    if int(os.environ.get("RANK", 0)):
        return 0  # torchrun's first process starts those that train
    path = output_path(args.out, "parallel.jsonl")
    bench = Bench(args, path, gpus_here() if args.gpus is None else args.gpus)
    layouts, slots = ([LAYOUTS[name] for name in names] for names in (args.layouts, args.slots))
    return 0 if all(bench.run(layouts, slots)) else 1


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="*", choices=LAYOUTS, default=MUST, metavar="LAYOUT", help=", ".join(LAYOUTS)
    )
    parser.add_argument(
        "--slots", nargs="+", choices=LAYOUTS, default=(), metavar="LAYOUT", help="of 8 and of 32 microbatches"
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run")
    parser.add_argument(
        "--microbatches", type=int, default=8, help="microbatches of a step, one sample each, for each model replica"
    )
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers and few image sizes")
    parser.add_argument("--untimed", action="store_true", help="all steps side by side, without times")
    parser.add_argument("--timed-steps", type=int, default=20, metavar="N", help="steps that are timed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when runs that have not ended are ended")
    parser.add_argument("--gpus", type=int, help="GPUs to use; all without it")
    parser.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="ranks that may share a GPU, without times, in layouts of more ranks than there are GPUs; 1 without it",
    )
    parser.add_argument("--logs", type=Path, help="folder for the runs' output; without it, it goes to this one's")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/parallel.jsonl without it")
    args = parser.parse_args(words)
    if not 1 <= args.ranks_per_gpu <= MOST_RANKS_PER_GPU:
        parser.error(f"--ranks-per-gpu {args.ranks_per_gpu}: allowed is 1 to {MOST_RANKS_PER_GPU}")
    return args


def gpus_here() -> int:
    """Return how many GPUs this process sees."""
    import torch

    return torch.cuda.device_count()


def of_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return a record's fields of each rank: peak memory in GiB; of those that have graphs replays and fallbacks."""
    graphs = [rank["graphs"] for rank in ranks if rank["graphs"] is not None]
    return {
        "rank_peak_gb": [rank["peak_gb"] for rank in ranks],
        "rank_replays": [each["replays"] for each in graphs],
        "rank_fallbacks": [sum(each["fallbacks"].values()) for each in graphs],
    }


class TimeIsUp(Exception):
    """A run had not ended when the time for all runs had."""


class Bench:
    """The runs of several layouts on the GPUs of one machine.

    Args:
        args: The command line's arguments.
        path: File of records.
        gpus: GPUs to use.
    """

    def __init__(self, args: argparse.Namespace, path: Path, gpus: int) -> None:
        self._args, self._path, self._count = args, path, gpus
        self._end = time.monotonic() + args.seconds
        self._gpus = Places([BESIDE[args.small]] * gpus)
        self._imports = Places([len(os.sched_getaffinity(0))])
        self._ms: dict[tuple[Layout, str], float] = {}

    def run(self, layouts: Sequence[Layout], slots: Sequence[Layout] = ()) -> list[bool]:
        """Run the layouts; returns for each whether graphs trained the same, or took as much with more microbatches.

        Args:
            layouts: Those that are trained eager and with graphs.
            slots: Those that are trained with few and with many microbatches.

        Raises:
            ValueError: A layout needs more GPUs than there are, or there is none.
        """
        if self._count < 1:
            raise ValueError(f"--gpus {self._count}: allowed is 1 or more; run it on a machine with NVIDIA GPUs")
        asked = [("layouts", layout) for layout in layouts] + [("slots", layout) for layout in slots]
        for option, layout in asked:
            sharing = ranks_per_gpu(layout.ranks, self._count)
            if sharing > self._args.ranks_per_gpu:
                raise ValueError(
                    f"--{option} {layout}: it needs {layout.ranks} GPUs, allowed here are {self._count}; with "
                    f"--ranks-per-gpu {sharing} its ranks share them, without times"
                )
        trained, counted = in_order(layouts, slots, self._args.microbatches, self._count)
        if not (trained or counted):
            return []
        with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(len(trained) + len(counted)) as pool:
            runs = {job: pool.submit(self._train, job, Path(turns)) for job in (*trained, *counted)}
            same = [self._finish(jobs, runs, self._write) for jobs in batched(trained, len(MODES))]
            return same + [
                self._finish(jobs, runs, self._write_slots) for jobs in batched(counted, len(SLOTS_MICROBATCHES))
            ]

    def _finish(
        self,
        jobs: Sequence[Job],
        runs: dict[Job, Future[dict[str, Any]]],
        write: Callable[[Sequence[Job], list[dict[str, Any]]], bool],
    ) -> bool:
        layout = jobs[0].layout
        try:
            return write(jobs, [runs[job].result() for job in jobs])
        except TrainingFailed as error:
            self._write_error(jobs[-1], error)
        except TimeIsUp:
            print(f"{layout}: not measured, the time was used up; give more --seconds", flush=True)
        return False

    def _train(self, job: Job, turns: Path) -> dict[str, Any]:
        """Train once; the processes import while others train.

        Raises:
            TrainingFailed: A process failed.
            TimeIsUp: The run had no time, or not enough.
        """
        with ExitStack() as stack:
            with self._imports.held(job.turn, (0,), job.layout.ranks):
                started = self._start(job, stack)
            with self._gpus.held(job.turn, job.devices, job.sharing):  # later runs wait for this turn
                if isinstance(started, Exception):
                    raise started
                run = self._train_in(started, job, turns)
        return {**run, "step_ms": run["step_ms"][: gpu.SKIPPED + self._timed(job)] if self._timed(job) else None}

    def _start(self, job: Job, stack: ExitStack) -> TrainingProcess | Exception:
        """Return a run's processes, which have imported the stack and end with `stack`, or why there are none."""
        if time.monotonic() >= self._end:
            return TimeIsUp()
        process = TrainingProcess(self._log(job), job.layout.ranks, job.devices)
        stack.callback(process.close)
        try:
            process.wait_until_ready()
        except TrainingFailed as error:
            return error
        return process

    def _train_in(self, process: TrainingProcess, job: Job, turns: Path) -> dict[str, Any]:
        began, told = time.monotonic(), "graphs" if job.mode in ("plugin", SLOTS) else "eager"
        words = [*self._words(job), *self._turns(job, turns)]
        if began >= self._end:
            raise TimeIsUp
        try:
            run = process.train(told, words, None if self._end == float("inf") else self._end - began)
        except TrainingFailed:
            if time.monotonic() >= self._end:
                raise TimeIsUp from None
            raise
        print(f"{job.layout} {job.mode} {job.microbatches}: {time.monotonic() - began:.0f} s", flush=True)
        return run

    def _timed(self, job: Job) -> int:
        """Return how many of a run's steps are timed."""
        wanted = job.mode in TIMED and not (self._args.untimed or job.shared)
        return min(self._args.timed_steps, max(self._args.steps - gpu.SKIPPED, 0)) if wanted else 0

    def _turns(self, job: Job, folder: Path) -> list[str]:
        if self._args.untimed:
            return []
        return ["--turns", str(folder), "--timed-steps", str(self._timed(job)), "--setup-in-turn"]

    def _log(self, job: Job) -> Path | None:
        folder = self._args.logs
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{job.layout}_{job.mode}_{job.microbatches}.log".replace(" ", "_")

    def _words(self, job: Job) -> list[str]:
        steps = SLOTS_STEPS if job.mode == SLOTS else self._args.steps
        words = ["--steps", str(steps), "--global-batch", str(job.microbatches * job.layout.data), *job.layout.words()]
        layers, width = job.layout.fitting_layers(LAYERS), SHARED_WIDTH if job.shared else WIDTH
        words += ["--language-model", f"{layers}x{width}"] if (layers, width) != (LAYERS, WIDTH) else []
        # How long replays take says nothing of graphs where ranks share GPUs, and must decide nothing.
        words += SLOTS_WORDS if job.mode == SLOTS else SHARED_WORDS if job.shared else ()
        return [*words, "--small", "--loader-workers", "0"] if self._args.small else words

    def _write(self, jobs: Sequence[Job], runs: list[dict[str, Any]]) -> bool:
        same = gpu.compare(runs[:-1], runs[-1], self._words(jobs[-1]), self._args.steps, None)
        eager_ms = gpu.median_ms(runs[0])
        for job, run in zip(jobs, runs, strict=True):
            ms = gpu.median_ms(run)
            repeats = max(len(run["step_ms"] or ()) - gpu.SKIPPED, int(job.shared))
            record = {**self._origin(job, max(repeats, 0)), "ms": ms, "losses": run["losses"]}
            record |= {"grad_norms": run["grad_norms"], "peak_gb": run["peak_gb"], "graphs": run["graphs"]}
            record |= {**of_ranks(run.get("ranks", [run])), "inside_spread": same if job.mode == "plugin" else None}
            if ms is not None:
                record |= self._ratios(job.layout, job.mode, ms, eager_ms)
            put_record(self._path, record)
        return same

    def _write_slots(self, jobs: Sequence[Job], runs: list[dict[str, Any]]) -> bool:
        taken = [run["graphs"]["memory_bytes"] for run in runs]
        for job, run in zip(jobs, runs, strict=True):
            graphs, gib = run["graphs"], run["graphs"]["memory_bytes"] / 2**30
            found = {"memory_gb": gib, "replays": graphs["replays"], "graphs": graphs}
            put_record(self._path, {**self._origin(job, 1), "ms": None, **found})
            print(f"{job.layout}, {job.microbatches} microbatches: graphs take {gib:.3f} GiB", flush=True)
        return max(taken) <= (1 + MOST_GROWTH) * min(taken)

    def _ratios(self, layout: Layout, mode: str, ms: float, eager_ms: float) -> dict[str, float]:
        """Return a run's time over eager's, and what its scaling keeps of one GPU's speed where that was measured."""
        self._ms[layout, mode] = ms
        ratios = {"ratio": ms / eager_ms}
        alone = self._ms.get((Layout(), mode))
        if layout == Layout(data=layout.data) and alone is not None:
            ratios["weak_scaling"] = alone / ms
            print(f"{layout} {mode}: weak scaling {alone / ms:.3f}", flush=True)
        return ratios

    def _write_error(self, job: Job, error: TrainingFailed) -> None:
        print(f"{job.layout}: {error}", flush=True)
        said = str(error).strip().splitlines()
        put_record(self._path, {**self._origin(job, 0), "error": f"{said[0]}: {said[-1]}"[:300]})

    def _origin(self, job: Job, repeats: int) -> dict[str, Any]:
        case = f"{job.layout}{'_small' if self._args.small else ''}".replace(" ", "_")
        case += "_shared" if job.shared else ""
        case += f"_{job.microbatches}_microbatches" if job.mode == SLOTS else ""
        sharing = {"ranks_per_gpu": job.sharing} if job.shared else {}
        origin = {**sharing, **provenance(repeats, 1234)}
        return {"case": case, "mode": job.mode, "microbatches": job.microbatches, **origin}


if __name__ == "__main__":
    sys.exit(main())
