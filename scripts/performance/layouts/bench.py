"""The runs of several layouts on the GPUs of one machine, in waves."""

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.cli.runs.results import provenance, put_cases
from examples.photographs.comparison import SKIPPED
from examples.photographs.layout import Layout
from scripts.performance.hosts import ranks_per_gpu
from scripts.performance.layouts.jobs import BALANCED, TIMED, Job
from scripts.performance.layouts.records import SEED, Writer
from scripts.performance.layouts.times import AHEAD
from scripts.performance.measuring.machine import divide, keep_to
from scripts.performance.processes import TrainingFailed, TrainingProcess

FEWEST_EAGER_RUNS = 2  # that have a spread


def check(layouts: Sequence[Layout], slots: Sequence[Layout], gpus: int, most_sharing: int) -> None:
    """Refuse layouts that the GPUs do not hold.

    Args:
        layouts: Those that are trained eager and with graphs.
        slots: Those that are trained with few and with many microbatches.
        gpus: GPUs to use.
        most_sharing: Ranks that may share a GPU.

    Raises:
        ValueError: A layout needs more GPUs than there are, or there is none.
    """
    if gpus < 1:
        raise ValueError(f"Cannot use --gpus {gpus}: it must be 1 or more. Run it on a machine with NVIDIA GPUs.")
    for option, layout in [("layouts", each) for each in layouts] + [("slots", each) for each in slots]:
        sharing = ranks_per_gpu(layout.ranks, gpus)
        if sharing > most_sharing:
            raise ValueError(
                f"Cannot use --{option} {layout}: it needs {layout.ranks} GPUs, and there are {gpus}. With "
                f"--ranks-per-gpu {sharing} its ranks share them, without times."
            )


def comparable(runs: Iterable[Job]) -> bool:
    """Return whether runs of a layout are enough to say how graphs train: eager's timed one, others, and graphs."""
    modes = {job.mode for job in runs}
    return modes.issuperset(TIMED) and sum(mode.startswith("eager") for mode in modes) >= FEWEST_EAGER_RUNS


class TimeIsUp(Exception):
    """A run had not ended when the time for all runs had."""


class Started(NamedTuple):
    """A run's processes.

    Attributes:
        process: The processes.
        ready: When they had imported the stack, or why they did not.
    """

    process: TrainingProcess
    ready: Future[float]


def ready_at(process: TrainingProcess) -> float:
    """Wait until a run's processes have imported the stack; returns when that was.

    Raises:
        TrainingFailed: They could not.
    """
    process.wait_until_ready()
    return time.monotonic()


class Bench:
    """The runs of several layouts on the GPUs of one machine.

    Args:
        args: The command line's arguments.
        path: File of records.
        gpus: GPUs to use.
    """

    def __init__(self, args: argparse.Namespace, path: Path, gpus: int) -> None:
        self._args, self._path = args, path
        self._began = time.monotonic()
        self._end = self._began + args.seconds
        self._cores = divide(os.sched_getaffinity(0), gpus)
        self._started: dict[Job, Started] = {}
        self._found: dict[Job, dict[str, Any] | Exception] = {}

    def run(self, runs: Sequence[Sequence[Job]]) -> list[bool]:
        """Train; returns for each layout whether graphs trained the same, or took as much with more microbatches.

        Args:
            runs: Waves of runs, in turn.
        """
        cases: dict[tuple[Layout, bool], list[Job]] = {}
        for job in (job for wave in runs for job in wave):
            cases.setdefault(job.case, []).append(job)
        verdicts: dict[tuple[Layout, bool], bool] = {}
        # Processes that still import end before what waits for them.
        with ThreadPoolExecutor(2 * sum(map(len, runs)) + 1) as pool, ExitStack() as stack:
            for wave in runs[:AHEAD]:
                self._start(wave, pool, stack)
            writer = Writer(self._args.small, provenance(0, SEED))  # PyTorch is imported, beside them
            for number, wave in enumerate(runs):
                self._run_wave(wave, runs[number + 1 :][:AHEAD], pool, stack)
                for case, jobs in cases.items():
                    if case not in verdicts and all(job in self._found for job in jobs):
                        verdicts[case] = self._finish(jobs, writer)
        return [verdicts[case] for case in cases]

    def _run_wave(
        self, wave: Sequence[Job], later: Sequence[Sequence[Job]], pool: ThreadPoolExecutor, stack: ExitStack
    ) -> None:
        """Train a wave's runs side by side, while the last of the later waves imports."""
        lost = {job: error for job in wave if (error := self._why_lost(job)) is not None}
        going = [job for job in wave if job not in lost]
        self._found |= lost
        wait([self._started[job].ready for job in going], self._left())
        if len(later) == AHEAD:
            self._start(later[-1], pool, stack)
        if going:
            print(f"at {time.monotonic() - self._began:.0f} s: {', '.join(map(str, going))}", flush=True)
        self._found |= dict(zip(going, pool.map(self._train, going), strict=True))
        self._tell_imports(going, [job for after in later for job in after])

    def _tell_imports(self, going: Sequence[Job], later: Sequence[Job]) -> None:
        """Say how long before a wave's end the others had imported, and how long its timed steps took."""
        now = time.monotonic()
        found = [run for run in map(self._found.get, going) if isinstance(run, dict) and run["step_ms"]]
        ready = [self._started[job].ready for job in later if job in self._started]
        if not (found and ready):
            return
        if not all(each.done() for each in ready):
            print("later runs still imported beside the timed steps", flush=True)
            return
        imported = max((each.result() for each in ready if each.exception() is None), default=now)
        timed = max(sum(run["step_ms"][SKIPPED:]) / 1e3 for run in found)
        print(f"later runs had imported {now - imported:.0f} s before; timed steps took {timed:.1f} s", flush=True)

    def _why_lost(self, job: Job) -> Exception | None:
        """Return why a run need not be trained: another of its layout failed, or time is up."""
        of_layout = [found for other, found in self._found.items() if other.case == job.case]
        failed = next((found for found in of_layout if isinstance(found, Exception)), None)
        return failed or (TimeIsUp() if time.monotonic() >= self._end else None)

    def _start(self, wave: Sequence[Job], pool: ThreadPoolExecutor, stack: ExitStack) -> None:
        """Let the processes of a wave import."""
        for job in wave:
            if self._why_lost(job) is not None:
                continue
            process = TrainingProcess(self._log(job), job.layout.ranks, job.devices)
            stack.callback(process.close)
            keep_to(process, [self._cores.importing] * job.layout.ranks)
            self._started[job] = Started(process, pool.submit(ready_at, process))

    def _train(self, job: Job) -> dict[str, Any] | Exception:
        """Train once; returns what came out, or why nothing did."""
        process, ready = self._started[job]
        began = time.monotonic()
        try:
            if not ready.done():
                raise TimeIsUp
            ready.result()
            keep_to(process, self._cores.of_ranks(job.layout.ranks, job.devices))
            run = process.train(job.told, job.words(self._args.small), self._left())
        except TrainingFailed as error:
            return TimeIsUp() if time.monotonic() >= self._end else error
        except TimeIsUp as error:
            return error
        print(f"{job}: {time.monotonic() - began:.0f} s", flush=True)
        timed = self._timed(job)
        # Of what stays, the first steps are those that no median counts.
        return {**run, "step_ms": run["step_ms"][-SKIPPED - timed :] if timed else None}

    def _left(self) -> float | None:
        """Return the seconds that are left; None for no limit."""
        return None if self._end == float("inf") else max(self._end - time.monotonic(), 0.0)

    def _timed(self, job: Job) -> int:
        """Return how many of a run's steps are timed."""
        wanted = job.mode in (*TIMED, BALANCED) and not job.shared
        return min(self._args.timed_steps, max(job.steps - SKIPPED, 0)) if wanted else 0

    def _log(self, job: Job) -> Path | None:
        folder: Path | None = self._args.logs
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{job.layout}_{job.mode}_{job.microbatches}.log".replace(" ", "_")

    def _finish(self, jobs: Sequence[Job], writer: Writer) -> bool:
        """Write the records of a layout whose runs have ended; returns its verdict."""
        runs: dict[Job, dict[str, Any]] = {}
        missing, failed = [], {}
        for job in jobs:
            found = self._found[job]
            if isinstance(found, TrainingFailed):
                failed[job] = found
            elif isinstance(found, Exception):
                missing.append(job)
            else:
                runs[job] = found
        if failed:
            job, error = next(iter(failed.items()))
            print(f"{job}: {error}", flush=True)
            put_cases(self._path, [writer.failed(job, error)])
            return False
        if missing:
            names = ", ".join(map(str, missing))
            print(f"not through when the time was used up: {names}; give more --seconds", flush=True)
            if not comparable(runs):
                return False
        records, good = writer.slots(runs) if jobs[0].case[1] else writer.trained(runs)
        put_cases(self._path, records)
        return good
