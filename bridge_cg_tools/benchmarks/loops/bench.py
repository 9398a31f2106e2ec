"""Runs of loops on one GPU: processes that import and build side by side, and take their turns on the GPU."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_cg_tools.benchmarks.loops import records
from bridge_cg_tools.benchmarks.records.results import provenance
from bridge_cg_tools.benchmarks.runs.outputs import error_in
from bridge_cg_tools.benchmarks.runs.processes import TrainingFailed, TrainingProcess

SEED = 0
EAGER = "eager"
LEFT_AT_END_S = 5.0  # for a process to write and end


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        name: In records.
        module: What its processes run; see `TrainingProcess`.
        timed: Modes that have the GPU for themselves, one after the other, an eager one first.
        spread: Eager modes that share it after them.
        needs_files: Whether its processes read a model's files.
    """

    name: str
    module: str
    timed: tuple[str, ...]
    spread: tuple[str, ...]
    needs_files: bool = False

    @property
    def modes(self) -> tuple[str, ...]:
        """All modes."""
        return self.timed + self.spread


WORKERS = "bridge_cg_tools.benchmarks.loops"
CASES = {
    "verl": Case("verl", f"{WORKERS}.verl_rounds", ("eager1", "plugin"), ("eager2", "eager3"), True),
    "plain": Case("plain", f"{WORKERS}.plain_rounds", ("eager1", "plugin", "plugin_frozen_outputs"), ("eager2",)),
}


class Bench:
    """Runs of one case.

    Args:
        case: The case.
        folder: For logs and turns.
        rounds: Of each run, at most.
        seconds: For all runs, from now on. A run that is late makes fewer rounds.
    """

    def __init__(self, case: Case, folder: Path, rounds: int, seconds: float) -> None:
        self._case, self._folder, self._rounds = case, folder, rounds
        self._end = time.time() + seconds
        self._processes: dict[str, TrainingProcess] = {}
        self._found: dict[str, dict[str, Any] | str] = {}

    @contextmanager
    def started(self) -> Iterator[None]:
        """Let all processes import; they are closed at the end."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with ExitStack() as stack:
            for mode in self._case.modes:
                log = self._folder / f"{self._case.name}_{mode}.log"
                process = TrainingProcess(log, module=self._case.module, environment=environment)
                stack.callback(process.close)
                self._processes[mode] = process
            yield

    def run(self, model: Path | None, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
        """Make all runs.

        Args:
            model: Folder of the model's files.
            keep: Gets the records so far whenever a run has ended.

        Returns:
            The records.
        """
        with ThreadPoolExecutor(len(self._case.modes)) as pool:
            runs = {mode: pool.submit(self._run, mode, model) for mode in self._case.modes}
            turns = [(mode,) for mode in self._case.timed] + [self._case.spread]
            for number, turn in enumerate(turns):
                self._take(turn, runs, turns_left=len(turns) - number)
                keep(self.records())
        return self.records()

    def _take(self, turn: Sequence[str], runs: Mapping[str, "Future[dict[str, Any] | str]"], turns_left: int) -> None:
        """Let the runs of one turn begin and wait for them; what is left of the time is shared evenly."""
        now = time.time()
        end = now + max(self._end - LEFT_AT_END_S - now, 0.0) / turns_left
        for mode in turn:
            self._begin(mode).with_suffix(".new").write_text(repr(end))
            self._begin(mode).with_suffix(".new").rename(self._begin(mode))
        for mode in turn:
            self._found[mode] = runs[mode].result()

    def _run(self, mode: str, model: Path | None) -> dict[str, Any] | str:
        process = self._processes[mode]
        words = ["--begin", str(self._begin(mode)), "--rounds", str(self._rounds), "--seed", str(SEED)]
        try:
            process.wait_until_ready()
            return process.train(
                mode, [*words, *([] if model is None else ["--model", str(model)])], max(self._end - time.time(), 0.0)
            )
        except TrainingFailed as error:
            print(f"{self._case.name} {mode}: {error}", file=sys.stderr, flush=True)
            return f"the time was used up: {error_in(str(error))}" if time.time() >= self._end else error_in(str(error))

    def _begin(self, mode: str) -> Path:
        return self._folder / f"{self._case.name}_{mode}.begin"

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the runs that have ended."""
        measured = {mode: run for mode, run in self._found.items() if isinstance(run, dict)}
        eager = [run for mode, run in measured.items() if mode.startswith(EAGER)]
        return [self._record(mode, run, eager) for mode, run in self._found.items()]

    def _record(self, mode: str, run: dict[str, Any] | str, eager: Sequence[dict[str, Any]]) -> dict[str, Any]:
        own = {"case": self._case.name, "mode": mode}
        if isinstance(run, str):
            return {**own, **provenance(0, SEED), "error": run}
        timed = isinstance(self._found.get("eager1"), dict)
        beside = () if mode == "eager1" or not timed else eager
        if mode.startswith(EAGER):  # its times were not taken alone, and it is part of the spread
            beside = beside[:1]
        found = records.record_of(run, beside)
        return {**own, **provenance(len(run["rounds"]), SEED), **found}
