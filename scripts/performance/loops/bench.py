"""Runs of loops: processes that import side by side and have a GPU each, one after the other where there is one."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.outputs import error_in
from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.upstream.environment import RELEASE_MEMORY
from scripts.performance.loops import records
from scripts.performance.processes import TrainingFailed, TrainingProcess

SEED = 0
EAGER = "eager"
LEFT_AT_END_S = 5.0  # for a process to write and end


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        name: In records.
        module: What its processes run; see `TrainingProcess`.
        modes: Of its runs, an eager one first.
        needs_files: Whether its processes read a model's files.
        deterministic: Whether eager runs repeat to the bit, so that all others are compared so.
        graphs_environment: Variables of processes with graphs.
    """

    name: str
    module: str
    modes: tuple[str, ...]
    needs_files: bool = False
    deterministic: bool = False
    graphs_environment: Mapping[str, str] = field(default_factory=dict)


# Runs whose log-probabilities are another eager run's than the first's: packs are padded in both.
SAME_ROWS = {"plugin_packed": "eager_padded"}
WORKERS = "scripts.performance.loops"
RELEASED = {RELEASE_MEMORY: "1"}
# cuDNN's deterministic attention takes 64 GiB for these packs, as Transformer Engine describes them to it.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# The optimizer's first steps amplify rounding, so few eager runs span too little.
VERL_MODES = ("eager1", "plugin_packed", "plugin", "eager2", "eager_padded", "eager3", "eager4", "eager5")
DETERMINISTIC_MODES = ("eager1", "plugin_packed", "plugin", "eager_padded", "eager2")
CASES = {
    "verl": Case("verl", f"{WORKERS}.verl_rounds", VERL_MODES, True, graphs_environment=RELEASED),
    "verl_lora": Case("verl_lora", f"{WORKERS}.verl_lora_rounds", VERL_MODES, True, graphs_environment=RELEASED),
    "verl_deterministic": Case(
        "verl_deterministic",
        f"{WORKERS}.verl_deterministic_rounds",
        DETERMINISTIC_MODES,
        needs_files=True,
        deterministic=True,
        graphs_environment=RELEASED,
    ),
    "plain": Case("plain", f"{WORKERS}.plain_rounds", ("eager1", "plugin", "plugin_frozen_outputs", "eager2")),
}


class Bench:
    """Runs of one case.

    Args:
        case: The case.
        folder: For logs and turns.
        rounds: Of each run, at most.
        seconds: For all runs, from now on. A run that is late makes fewer rounds.
        gpus: So many runs go side by side, with a GPU each.
    """

    def __init__(self, case: Case, folder: Path, rounds: int, seconds: float, gpus: int = 1) -> None:
        self._case, self._folder, self._rounds, self._gpus = case, folder, rounds, gpus
        self._end = time.time() + seconds
        self._processes: dict[str, TrainingProcess] = {}
        self._found: dict[str, dict[str, Any] | str] = {}

    @contextmanager
    def started(self) -> Iterator[None]:
        """Let all processes import; they are closed at the end."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment |= DETERMINISTIC if self._case.deterministic else {}
        with ExitStack() as stack:
            for number, mode in enumerate(self._case.modes):
                log = self._folder / f"{self._case.name}_{mode}.log"
                own = {} if mode.startswith(EAGER) else self._case.graphs_environment
                process = TrainingProcess(
                    log,
                    devices=[number % self._gpus] if self._gpus > 1 else None,
                    module=self._case.module,
                    environment={**environment, **own},
                )
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
        modes, gpus = self._case.modes, self._gpus
        waves = [modes[first : first + gpus] for first in range(0, len(modes), gpus)]
        with ThreadPoolExecutor(gpus) as pool:
            for number, wave in enumerate(waves):
                train = partial(self._run, model=model, turns_left=len(waves) - number)
                for mode, found in zip(wave, pool.map(train, wave), strict=True):
                    self._found[mode] = found
                    keep(self.records())
        return self.records()

    def _run(self, mode: str, model: Path | None, turns_left: int) -> dict[str, Any] | str:
        """Let a process build and make its rounds; what is left of the time is shared evenly."""
        process = self._processes[mode]
        try:
            process.wait_until_ready()
            now = time.time()
            end = now + max(self._end - LEFT_AT_END_S - now, 0.0) / turns_left
            words = ["--end", repr(end), "--rounds", str(self._rounds), "--seed", str(SEED)]
            return process.train(
                mode, [*words, *([] if model is None else ["--model", str(model)])], max(self._end - time.time(), 0.0)
            )
        except TrainingFailed as error:
            print(f"{self._case.name} {mode}: {error}", file=sys.stderr, flush=True)
            return f"the time was used up: {error_in(str(error))}" if time.time() >= self._end else error_in(str(error))

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
        if mode.startswith(EAGER):  # it is part of the spread
            beside = beside[:1]
        same_rows = self._found.get(SAME_ROWS.get(mode, "eager1"))
        twin = same_rows if isinstance(same_rows, dict) else None
        found = records.record_of(run, beside, twin, self._case.deterministic)
        return {**own, **provenance(len(run["rounds"]), SEED), **found}
