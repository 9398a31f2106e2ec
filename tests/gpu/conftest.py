"""GPU tests: real graphs of Bridge's vision tower at full width, a few layers deep."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch

from examples.photographs.processes import TrainingProcess, free_port

LAYERS = 4
# Small training runs take some 20 GB each.
SIDE_BY_SIDE = 5


@dataclass(frozen=True)
class Training:
    """One small training run of the main job; equal ones are run once.

    Attributes:
        mode: "eager" or "graphs".
        words: Further words of its command line; "{folder}" stands for the session's folder.
        steps: Optimizer steps.
        after: A run that must have ended before.
    """

    mode: str
    words: tuple[str, ...] = ()
    steps: int = 6
    after: "Training | None" = None


class Trainings:
    """The session's training runs, a few side by side on every GPU, while the next ones import."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gpus = [Semaphore(SIDE_BY_SIDE) for _ in range(torch.cuda.device_count())]
        self._pool = ThreadPoolExecutor(2 * SIDE_BY_SIDE * len(self._gpus))
        self._results: dict[Training, Future[dict[str, Any]]] = {}

    def start(self, training: Training) -> Future[dict[str, Any]]:
        if training not in self._results:
            before = self.start(training.after) if training.after is not None else None
            self._results[training] = self._pool.submit(self._train, training, len(self._results), before)
        return self._results[training]

    def __call__(self, training: Training) -> dict[str, Any]:
        return self.start(training).result()

    def _train(self, training: Training, place: int, before: Future[dict[str, Any]] | None) -> dict[str, Any]:
        log, gpu = self._folder / f"{place}.log", place % len(self._gpus)
        process = TrainingProcess(log, gpu)
        process.wait_until_ready()
        if before is not None:
            before.result()
        words = ["--small", "--steps", str(training.steps), *(w.format(folder=self._folder) for w in training.words)]
        with self._gpus[gpu]:
            return {**process.train(training.mode, words), "output": log.read_text()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def training_under_way(request) -> None:
    """Start training runs with the first test that takes no times."""
    if not is_timed(request.node):
        request.getfixturevalue("trained")


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory) -> Iterator[Trainings]:
    """Return the result of a `Training`; those that tests have as parameters are under way from the beginning."""
    trainings = Trainings(tmp_path_factory.mktemp("trainings"))
    for item in request.session.items:
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, Training):
                trainings.start(value)
    yield trainings
    trainings.close()


# What takes times has the GPU to itself: these come first, before training runs start.
SCRIPTS = ("test_benchmarks", "test_compare")
TIMED = (*SCRIPTS, "test_costs")


def is_timed(item: pytest.Item) -> bool:
    return item.path.stem in TIMED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=is_timed, reverse=True)
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if item.path.stem in SCRIPTS:
            item.add_marker(pytest.mark.scripts)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def tower_module():
    os.environ["MASTER_PORT"] = str(free_port())
    from scripts.performance import tower

    tower.start_process()
    return tower


@pytest.fixture
def model(tower_module):
    made = tower_module.build_tower(layers=LAYERS)
    yield made
    made.__dict__.pop("forward", None)


@pytest.fixture
def grads(model, tower_module):
    return tower_module.MainGrads(model)


@pytest.fixture
def graphs_of(model):
    """Return a function that captures the model with the given options and returns its helper."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.helper import VisionTECudaGraphHelper

    helpers = []

    def make(num_microbatches: int = 1, capture: bool = True, **options):
        settings = {"impl": "transformer_engine", "strict": True, **options}
        helper = VisionTECudaGraphHelper(
            model, model.config, num_microbatches=num_microbatches, options=VisionGraphOptions(**settings)
        )
        helpers.append(helper)
        if capture:
            helper.create_cudagraphs()
        return helper

    yield make
    for helper in helpers:
        helper.delete_cuda_graphs()
    torch.cuda.empty_cache()
