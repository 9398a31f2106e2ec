"""Measuring modes that share a process: the same weights and inputs, an eager baseline beside every case."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridge_cg_plugin.cli.runs.results import first_line, provenance, put_record
from scripts.performance.measuring import measure
from scripts.performance.measuring.memory import PeakMemory, collect
from scripts.performance.models import tower
from scripts.performance.models.arithmetic import step_flops
from scripts.performance.models.modes import MODES, Eager, Mode, Plugin
from scripts.performance.models.workloads import Grid, description
from scripts.performance.vision.task import Task

# The status of a process whose GPU is of no use any more.
POISONED = 3
# Timed runs of the baseline where eager itself is not asked for.
BASELINE_REPEATS = 5


class Baseline:
    """What eager gave for one case: outputs, gradients, the record."""

    def __init__(self, outputs: list[Tensor], gradients: list[Tensor], record: dict[str, Any]) -> None:
        self.outputs, self.gradients, self.record = outputs, gradients, record


class Group:
    """The tower in one process.

    Args:
        modes: Their names.
        repeats: Timed runs of each measurement.
        case_seconds: When no further repeat of a measurement begins.
    """

    def __init__(self, modes: tuple[str, ...], repeats: int, case_seconds: float) -> None:
        self.repeats, self.case_seconds = repeats, case_seconds
        self.modes: dict[str, Mode] = {name: MODES[name]() for name in modes}
        self.model = tower.build_tower(impl="transformer_engine" if "upstream" in modes else "none")
        self.grads = tower.MainGrads(self.model)
        self.model.train()

    def baseline(self, name: str, grid: Grid) -> tuple[tower.Batch, Baseline]:
        """Run a case eager: its outputs, gradients and times."""
        batch = tower.make_batch(grid, self.model)
        repeats = self.repeats if "eager" in self.modes else BASELINE_REPEATS
        with Eager().on(self.model, self.grads, batch) as (model, _):
            outputs, gradients, _ = self._results(model, batch)
            _, again, peak = self._results(model, batch)
            noise = tower.largest_relative(again, gradients)
            fields = {**self._timed(model, batch, repeats), "ratio": 1.0, "eager_memory_gb": peak, "grad_noise": noise}
        return batch, Baseline(outputs, gradients, {**description(name, "eager", grid), **fields})

    def measure(self, mode: Mode, name: str, grid: Grid, batch: tower.Batch, baseline: Baseline) -> dict[str, Any]:
        """Run a case in a mode beside its baseline; returns the record."""
        if isinstance(mode, Eager):
            return baseline.record
        with mode.on(self.model, self.grads, batch) as (model, fields):
            outputs, gradients, peak = self._results(model, batch)
            fields.setdefault("memory_gb", peak)
            timed = self._timed(model, batch, self.repeats)
            if isinstance(mode, Plugin):
                with self.grads.not_awaited(), mode.training_step():
                    timed["replay_host_ms"] = measure.host_in_a_row(lambda: tower.step(model, batch))
        forward = tower.largest_relative(outputs, baseline.outputs)
        return {
            **description(name, mode.name, grid),
            **timed,
            **fields,
            "ratio": timed["ms"] / baseline.record["ms"],
            "forward_rel": forward,
            "bit_equal": all(map(torch.equal, outputs, baseline.outputs)),
            "grad_rel": tower.largest_relative(gradients, baseline.gradients),
            "grad_noise": baseline.record["grad_noise"],
            "eager_memory_gb": baseline.record["eager_memory_gb"],
        }

    def _results(self, model: Any, batch: tower.Batch) -> tuple[list[Tensor], list[Tensor], float]:
        """Return outputs, gradients, and the device memory in GiB that the step took at its peak."""
        self.grads.zero()
        peak = PeakMemory()
        outputs = tower.step(model, batch)
        # Copies: a compiled tower reuses the memory of its outputs.
        taken = peak.read()
        return [output.clone() for output in outputs], self.grads.copy(), taken

    def _timed(self, model: Any, batch: tower.Batch, repeats: int) -> dict[str, Any]:
        def run(between: Any) -> None:
            tower.step(model, batch, between)

        times = measure.median_times(run, repeats, warmup=1, seconds=self.case_seconds)
        kernels = measure.profile(lambda: tower.step(model, batch))
        found = {
            "ms": times.ms,
            "fwd_ms": times.fwd_ms,
            "host_ms": times.host_ms,
            "tflop": step_flops(batch.rows) / 1e12,
            **provenance(times.repeats, 0),
        }
        if kernels.count:
            families = kernels.families()
            found |= {"gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count, "families": families}
        return found


def measure_group(task: Task) -> int:
    """Measure every case in every mode and write each record at once; returns the process's status."""
    deadline = time.monotonic() + task.seconds
    tower.start_process()
    group = Group(tuple(task.modes), task.repeats, task.case_seconds)
    for name, grid in task.grids.items():
        if not measure_case(group, task, name, [(t, h, w) for t, h, w in grid], deadline):
            return POISONED
    return 0


def measure_case(group: Group, task: Task, name: str, grid: Grid, deadline: float) -> bool:
    """Measure one case in every mode; returns whether the process can go on."""
    prepared = None
    for mode in group.modes.values():
        try:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not measured, the {task.seconds:.0f} s of this process were used up")
            if prepared is None:
                prepared = group.baseline(name, grid)
            record = group.measure(mode, name, grid, *prepared)
        except Exception as error:
            record = {**description(name, mode.name, grid), "error": explained(error), **provenance(0, 0)}
            if hasattr(mode, "wrong"):
                record["wrong"] = mode.wrong
        put_record(Path(task.out), record)
        print(f"{name} {mode.name}: {record.get('error') or format(record['ms'], '.2f') + ' ms'}", flush=True)
        collect()
        if "error" in record and not gpu_is_usable():
            return False
    return True


def explained(error: BaseException) -> str:
    """Return an error's first line; a lack of memory, whatever wraps it, says so first."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        chain.append(at)
        at = at.__cause__
    if any(isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e).lower() for e in chain):
        return f"out of memory: {first_line(chain[-1])}"
    return first_line(error)


def gpu_is_usable() -> bool:
    """Whether kernels and random numbers still work after an error; a failed capture can leave both broken."""
    if not measure.on_gpu():
        return True
    try:
        torch.rand(8, device="cuda").sum().item()
    except RuntimeError:
        return False
    return not torch.cuda.is_current_stream_capturing()
