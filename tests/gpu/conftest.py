"""GPU tests: real graphs of Bridge's vision tower at full width, a few layers deep."""

import gc
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

import pytest
import torch

from examples.photographs.arguments import layout_in
from examples.photographs.hosts import ranks_per_gpu
from examples.photographs.processes import TrainingProcess, free_port

LAYERS = 4
# Small training runs take some 20 GB each, tests beside them up to 70 GB; with several GPUs most tests are on another.
SIDE_BY_SIDE = 5 if "GPU_TESTS_PART" in os.environ else 3
# Training runs start while tests build models, for which megatron-core sets variables that count in the whole process.
ENVIRONMENT = dict(os.environ)
# Those over several GPUs wait for each other's processes: more at once would only get in each other's way.
PARALLEL_SIDE_BY_SIDE = 5
# Where there are fewer GPUs than ranks, so many may share one: their memory has to fit.
MOST_RANKS_PER_GPU = 2
# One whose processes wait for each other for ever must not take the others' time.
LIMIT_S = 240.0


@dataclass(frozen=True)
class Training:
    """One small training run of the main job; equal ones are run once.

    Attributes:
        mode: "eager" or "graphs".
        words: Further words of its command line; "{folder}" stands for the session's folder.
        steps: Optimizer steps.
        after: A run that must have ended before.
        prepare: `module:function` that each of its processes calls before it trains.
        module: What trains; see `TrainingProcess`.
        number: Which of several runs that are otherwise equal.
    """

    mode: str
    words: tuple[str, ...] = ()
    steps: int = 6
    after: "Training | None" = None
    prepare: str | None = None
    module: str = "examples.photographs.training"
    number: int = 1

    @property
    def ranks(self) -> int:
        return layout_in(self.words).ranks


class Trainings:
    """The session's training runs, a few side by side on every GPU, while the next ones import.

    Args:
        folder: For what runs write.
        side_by_side: Runs on each GPU at once.
    """

    def __init__(self, folder: Path, side_by_side: int) -> None:
        self._folder = folder
        self._gpus = [Semaphore(side_by_side) for _ in range(torch.cuda.device_count())]
        self._taking = Lock()
        self._pool = ThreadPoolExecutor(2 * side_by_side * len(self._gpus))
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
        process = TrainingProcess(log, training.ranks, devices, training.prepare, training.module, ENVIRONMENT)
        process.wait_until_ready()
        if before is not None:
            before.result()
        words = ["--small", "--steps", str(training.steps), *(w.format(folder=self._folder) for w in training.words)]
        limit_s = LIMIT_S if training.ranks > 1 else None
        with ExitStack() as stack:
            with self._taking:  # one run after the other, so that no two have a part of what both want
                for device in devices * ranks_per_gpu(training.ranks, len(devices)):
                    stack.enter_context(self._gpus[device])
            return {**process.train(training.mode, words, limit_s), "output": log.read_text()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """Leave nothing of a module's to PyTorch's cache: training runs share the GPU."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def training_under_way(request) -> None:
    """Start training runs with the first test that takes no times."""
    if not is_timed(request.node):
        request.getfixturevalue("trained")


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory) -> Iterator[Trainings]:
    """Return the result of a `Training`; those that tests have as parameters are under way from the beginning."""
    wanted = [
        value
        for item in request.session.items
        for value in (item.callspec.params.values() if hasattr(item, "callspec") else ())
        if isinstance(value, Training) and not item.get_closest_marker("skip")
    ]
    several = any(training.ranks > 1 for training in wanted)
    trainings = Trainings(tmp_path_factory.mktemp("trainings"), PARALLEL_SIDE_BY_SIDE if several else SIDE_BY_SIDE)
    for training in sorted(wanted, key=lambda each: each.ranks, reverse=True):
        trainings.start(training)
    yield trainings
    trainings.close()


# What takes times has the GPU to itself: these come first, before training runs start.
SCRIPTS = ("test_benchmarks", "test_bench_encoders", "test_compare", "test_presets", "test_train_offload")
TIMED = (*SCRIPTS, "test_costs", "test_small_recipe")
# Runs over several GPUs.
PARALLEL = ("test_parallel", "test_packed_parallel", "test_shared_gpus")


def is_timed(item: pytest.Item) -> bool:
    return item.path.stem in TIMED


# Those of which each test is a training run of its own take a GPU for as long as all others take another.
LONG = ("test_pretrain", "test_tower_training", "test_packed_mamba")


def part_of(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Return the tests of one of two or more processes, `NUMBER/COUNT`; `./run gpu-test` starts one on each GPU."""
    number, count = map(int, part.split("/"))
    modules = sorted({item.path.stem for item in items}, key=lambda name: (name not in LONG, name))
    share = count // 2
    place = {name: n % share if name in LONG else share + n % (count - share) for n, name in enumerate(modules)}
    return [item for item in items if place[item.path.stem] == number]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := os.environ.get("GPU_TESTS_PART"):
        kept = part_of(items, part)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    items.sort(key=is_timed, reverse=True)
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if item.path.stem in SCRIPTS:
            item.add_marker(pytest.mark.scripts)
        parallel = item.path.stem in PARALLEL
        if parallel:
            item.add_marker(pytest.mark.parallel)
        found, needed = torch.cuda.device_count(), gpus_needed(item) if parallel else 1
        if int(os.environ.get("RANK", 0)):
            item.add_marker(pytest.mark.skip(reason="torchrun's first process runs the tests"))
        elif found < needed:
            many = "an NVIDIA GPU" if needed == 1 else f"{needed} NVIDIA GPUs"
            item.add_marker(pytest.mark.skip(reason=f"needs {many}"))


def gpus_needed(item: pytest.Item) -> int:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    ranks = max((value.ranks for value in values if isinstance(value, Training)), default=2 * MOST_RANKS_PER_GPU)
    return ranks_per_gpu(ranks, MOST_RANKS_PER_GPU)


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
