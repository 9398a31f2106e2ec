"""Training runs that GPU tests compare: each is done once in a session, a few side by side on every GPU."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

import pytest
import torch

from examples.photographs.arguments import layout_in
from examples.photographs.hosts import ranks_per_gpu
from examples.photographs.processes import TrainingProcess

# Small training runs of the main job take some 20 GB each, others less, tests beside them up to 70 GB: on a smaller GPU
# these come first, and leave some 20 GB taken.
MAIN_JOB_GB, OTHERS_GB = 20, 16
ROOM_GB, ROOM_ON_SMALLER_GB, BESIDE_TESTS_GB = 64, 50, 130
# Training runs start while tests build models, for which megatron-core sets variables that count in the whole process.
ENVIRONMENT = dict(os.environ)
# Those over several GPUs are smaller, and wait for each other's processes: more at once would only get in the way.
ROOM_OF_PARALLEL_GB = 100
# Where there are fewer GPUs than ranks, so many may share one: their memory has to fit.
MOST_RANKS_PER_GPU = 2
# One whose processes wait for each other for ever must not take the others' time.
LIMIT_S = 240.0


def fit_beside_tests() -> bool:
    """Return whether training runs fit on every GPU beside tests."""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return min((gpu.total_memory for gpu in gpus), default=0) >= BESIDE_TESTS_GB * 1e9


def room_gb(several: bool) -> int:
    """Return the memory that training runs of one rank, or of several, have on each GPU."""
    if several:
        return ROOM_OF_PARALLEL_GB
    return ROOM_GB if fit_beside_tests() else ROOM_ON_SMALLER_GB


@dataclass(frozen=True)
class Training:
    """One small training run of the main job; equal ones are run once.

    Attributes:
        mode: "eager" or "graphs".
        words: Further words of its command line; "{folder}" stands for the session's folder.
        steps: Optimizer steps.
        main_job: Whether its command line is the main job's, which is told to train small; any other is of one rank.
        after: A run that must have ended before.
        prepare: `module:function` that each of its processes calls before it trains.
        module: What trains; see `TrainingProcess`.
        environment: Variables that its processes have besides the session's, by name.
        number: Which of several runs that are otherwise equal.
    """

    mode: str
    words: tuple[str, ...] = ()
    steps: int = 6
    main_job: bool = True
    after: "Training | None" = None
    prepare: str | None = None
    module: str = "examples.photographs.training"
    environment: tuple[tuple[str, str], ...] = ()
    number: int = 1

    @property
    def ranks(self) -> int:
        return layout_in(self.words).ranks if self.main_job else 1

    @property
    def gb(self) -> int:
        return MAIN_JOB_GB if self.main_job else OTHERS_GB


def trainings_of(item: pytest.Item) -> list[Training]:
    """Return the training runs that a test waits for: its parameters, and those that these wait for."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    given = chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
    found = [value for value in given if isinstance(value, Training)]
    return [run for each in found for run in (each, each.after) if run is not None]


class Trainings:
    """The session's training runs, a few side by side on every GPU, while the next ones import.

    Args:
        folder: For what runs write.
        room_gb: Memory of each GPU that they have.
        at_once: Runs that import or train, for each GPU.
    """

    def __init__(self, folder: Path, room_gb: int, at_once: int) -> None:
        self._folder = folder
        self._gpus = [Semaphore(room_gb) for _ in range(torch.cuda.device_count())]
        self._taking = Lock()
        self._pool = ThreadPoolExecutor(at_once * len(self._gpus))
        self._sets: dict[int, Iterator[tuple[int, ...]]] = {}
        self._results: dict[Training, Future[dict[str, Any]]] = {}

    def start(self, training: Training) -> Future[dict[str, Any]]:
        if training not in self._results:
            before = self.start(training.after) if training.after is not None else None
            log = self._folder / f"{len(self._results)}.log"
            devices = self._devices(training.ranks)
            self._results[training] = self._pool.submit(self._train, training, log, before, devices)
        return self._results[training]

    def _devices(self, ranks: int) -> tuple[int, ...]:
        """Return the GPUs of a run: disjoint sets of as many as it has ranks, in turn; all where there are fewer."""
        found = len(self._gpus)
        gpus = min(ranks, found)
        sets = [tuple(range(first, first + gpus)) for first in range(0, found - gpus + 1, gpus)]
        return next(self._sets.setdefault(gpus, cycle(sets)))

    def __call__(self, training: Training) -> dict[str, Any]:
        return self.start(training).result()

    def _train(
        self, training: Training, log: Path, before: Future[dict[str, Any]] | None, devices: tuple[int, ...]
    ) -> dict[str, Any]:
        environment = {**ENVIRONMENT, **dict(training.environment)}
        process = TrainingProcess(log, training.ranks, devices, training.prepare, training.module, environment)
        process.wait_until_ready()
        if before is not None:
            before.result()
        words = ["--small"] * training.main_job + ["--steps", str(training.steps)]
        words += [word.format(folder=self._folder) for word in training.words]
        with ExitStack() as stack:
            with self._taking:  # one run after the other, so that no two have a part of what both want
                for device in devices * ranks_per_gpu(training.ranks, len(devices)) * training.gb:
                    stack.enter_context(self._gpus[device])
            return {**process.train(training.mode, words, LIMIT_S), "output": log.read_text()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
