"""Whole optimizer steps: the training runs of bench_step.py and their records."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bridge_cg_plugin.cli.runs.comparison import WRONG
from bridge_cg_plugin.cli.runs.outputs import error_in
from bridge_cg_plugin.cli.runs.results import loss_distance, provenance
from scripts.performance.measuring.places import Places
from scripts.performance.photographs.comparison import SKIPPED, median_ms
from scripts.performance.runs.processes import TrainingFailed, TrainingProcess

IMAGES = {"single": ("--single",), "mixed": (), "large": ("--large",)}
LANGUAGE_MODELS = ("4x2048", "16x2048", "28x2560")
# Mode -> (what examples.photographs --train is told, its further words).
MODES = {
    "eager": ("eager", ()),
    # Its capture aborts under overlap_param_gather, which the other modes have.
    "upstream": ("upstream", ("--no-overlap",)),
    "plugin": ("graphs", ()),
    "plugin_language_model": ("graphs", ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=[]")),
    "plugin_full_iteration": ("graphs", ("model.cuda_graph_impl=full_iteration",)),
}
# Processes that import while others train.
AHEAD = 4
# Samples, those of 4 steps: all are met before steps are timed, so that eager's attention is planned by then.
DISTINCT = 16
USABLE = 0.92  # part of a GPU's memory
# For an estimate of what a run takes: weights, their gradients and optimizer states; the rest.
VOCABULARY, TOWER_WEIGHTS, BYTES_OF_A_WEIGHT, ACTIVATIONS_GIB = 151_936, 0.58e9, 18, 22
WHOLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One training run.

    Attributes:
        images: Of `IMAGES`.
        language_model: Layers x width.
        mode: Of `MODES`.
    """

    images: str
    language_model: str
    mode: str

    @property
    def name(self) -> str:
        """Name in records."""
        return f"{self.images}_{self.language_model}"

    @property
    def gib(self) -> int:
        """Device memory that the run may take; upstream's graphs, of every microbatch, are given all."""
        layers, width = map(int, self.language_model.split("x"))
        weights = 15.5 * layers * width**2 + 2 * VOCABULARY * width + TOWER_WEIGHTS
        return WHOLE if self.mode == "upstream" else int(weights * BYTES_OF_A_WEIGHT / 2**30) + ACTIVATIONS_GIB


class Bench:
    """Runs that share a GPU as far as its memory goes: one is set up and warms up beside others' steps, never beside
    those that are timed.

    Args:
        folder: For the runs' output and locks.
        steps: Optimizer steps of each run.
        deadline: When no further run begins.
    """

    def __init__(self, folder: Path, steps: int, deadline: float) -> None:
        self._folder, self._steps, self._deadline = folder, steps, deadline
        self._ahead, self._gpu = Places([AHEAD]), Places([gpu_gib()])

    def train(self, turn: int, case: Case) -> dict[str, Any] | str:
        """Train one run; returns what it did, or why it did not."""
        with ExitStack() as stack:
            with self._ahead.held(turn, (0,)):
                process = TrainingProcess(self._folder / f"{turn}.log")
                stack.callback(process.close)
                failure = ready(process)
                stack.enter_context(self._gpu.held(turn, (0,), case.gib))
            if failure is None and time.monotonic() > self._deadline:
                failure = "not measured, the time was used up; give more --seconds"
            return failure or self._measure(process, case)

    def _measure(self, process: TrainingProcess, case: Case) -> dict[str, Any] | str:
        told, further = MODES[case.mode]
        words = ["--steps", str(self._steps), "--language-model", case.language_model, *IMAGES[case.images], *further]
        words += ["--distinct", str(DISTINCT), "--loader-workers", "0", "--setup-in-turn"]
        words += ["--turns", str(self._folder), "--timed-steps", str(self._steps - SKIPPED)]
        began = time.monotonic()
        try:
            run = process.train(told, words)
        except TrainingFailed as error:
            return error_in(str(error))
        print(f"{case.name} {case.mode}: {time.monotonic() - began:.0f} s", flush=True)
        return run


def ready(process: TrainingProcess) -> str | None:
    """Wait until a process has imported the stack; returns the error if it could not."""
    try:
        process.wait_until_ready()
    except TrainingFailed as error:
        return error_in(str(error))
    return None


def gpu_gib() -> int:
    """Return the GiB of the GPU that runs may take together, 1 where there is none: then each is alone."""
    if not torch.cuda.is_available():
        return 1
    return int(USABLE * torch.cuda.get_device_properties(0).total_memory / 2**30)


def record_of(case: Case, run: dict[str, Any] | str, steps: int, eager: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record of what a run did, or of why it did not."""
    if isinstance(run, str):
        return unmeasured(case, run)
    ms = median_ms(run)
    record = {
        **description(case),
        "ms": ms,
        "losses": run["losses"],
        "grad_norms": run["grad_norms"],
        "peak_gb": run["peak_gb"],
        "graphs": run["graphs"],
        "distinct_samples": DISTINCT,
        **provenance(steps - SKIPPED, 1234),
    }
    if case.mode != "upstream":  # its vision layers look alike
        record["language_model_layers"] = run["language_model_layers"]
    if case.mode == "eager":
        record["ratio"] = 1.0
    elif eager is not None and len(eager["losses"]) == len(run["losses"]):
        record["ratio"] = ms / eager["ms"]
        record["loss_rel"] = loss_distance(run["losses"], eager["losses"])
    return record


def description(case: Case) -> dict[str, Any]:
    """Return the fields that say what ran."""
    fields = {"case": case.name, "mode": case.mode, "language_model": case.language_model}
    wrong = {"wrong": WRONG} if case.mode == "upstream" else {}
    return {**fields, "overlap": "--no-overlap" not in MODES[case.mode][1], **wrong}


def unmeasured(case: Case, error: str) -> dict[str, Any]:
    """Return the record of a run that was not measured."""
    return {**description(case), "error": error, **provenance(0, 1234)}


def eager_of(case: Case, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the eager record of a case that was measured at the same commit, if there is one."""
    commit = provenance(0, 0)["versions"]["commit"]
    found = (r for r in records if (r["case"], r["mode"]) == (case.name, "eager") and "error" not in r)
    return next((r for r in found if r["versions"]["commit"] == commit), None)
