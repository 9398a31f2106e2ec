"""Training runs that share GPUs: their steps go side by side, except those that a run has its GPUs to itself for."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext

from scripts.performance.photographs.comparison import SKIPPED

# The first step on graphs: how long replays take decides about later microbatches.
FIRST_ALONE = 3


def steps_alone(timed: int) -> range:
    """Return the steps, from 0, that a run has its GPUs to itself for so that as many as `timed` can be timed."""
    return range(FIRST_ALONE, SKIPPED + timed) if timed else range(0)


class SharedGpus:
    """GPUs that several processes use, each beside others or alone: two locks for each GPU, in files.

    A process that wants a GPU alone keeps its gate shut while it waits; whoever comes later waits at the gate.

    Args:
        folder: Of the files.
        names: What the processes call the GPUs.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._gates = [folder / f"{name}.gate" for name in sorted(names)]
        self._gpus = [folder / f"{name}.gpu" for name in sorted(names)]
        self._held = ExitStack()

    def take(self, alone: bool) -> None:
        """Give back what is held, then wait until the GPUs can be had, alone or beside others."""
        self.give_back()
        # All in one order, and nothing held before: no two processes wait for each other.
        with ExitStack() as gates:
            for gate in self._gates:
                _lock(gate, fcntl.LOCK_EX, gates)
            for gpu in self._gpus:
                _lock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, self._held)

    def give_back(self) -> None:
        """Let others have the GPUs."""
        self._held.close()


def _lock(path: Path, kind: int, until: ExitStack) -> None:
    file = until.enter_context(path.open("a"))
    fcntl.flock(file, kind)
    # Closing would not do while a forked data loader has the file too.
    until.callback(fcntl.flock, file, fcntl.LOCK_UN)


class Turns(Callback):
    """Takes the GPUs of a run of one process before each step.

    From the first step's start to the end of training they are held, also between steps, where graphs are captured.

    Args:
        folder: Of the lock files, the same for all runs that share the GPUs.
        alone: Steps, from 0, without others beside them.
        at_once: Whether to take the GPUs now, beside others, so that set-up too waits for steps alone.
    """

    def __init__(self, folder: Path, alone: range, at_once: bool = False) -> None:
        self._gpus = SharedGpus(folder, visible_gpus())
        self._alone = alone
        self._step = 0
        self._is_alone = False
        if at_once:
            self._gpus.take(alone=False)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Wait for the GPUs; between two steps alone nothing is done."""
        alone = self._step in self._alone
        self._step += 1
        if not (alone and self._is_alone):
            _finish_kernels()
            self._gpus.take(alone)
        self._is_alone = alone

    def on_train_end(self, context: CallbackContext) -> None:
        """Give the GPUs back."""
        _finish_kernels()
        self._gpus.give_back()


def _finish_kernels() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls this process's GPUs, their indices without it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
