"""GPU tests: real graphs of Bridge's vision tower at full width, a few layers deep."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bridge_cg_plugin.cli.runs.recipe import free_port
from bridge_cg_plugin.graphs.errors import release_frames
from examples.photographs.hosts import ranks_per_gpu

from .common import vision_graphs
from .parts import PARALLEL, SCRIPTS, part_of
from .trainings import MOST_RANKS_PER_GPU, Trainings, fit_beside_tests, room_gb, trainings_of

LAYERS = 4
# What modules may leave on the device: fixtures of the session, and what libraries keep.
LEFT_BYTES = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """Leave nothing of a module's on the device: training runs share the GPU.

    pytest holds the last test's fixtures until the next module begins, which finds what was left.
    """
    _free()
    left = torch.cuda.memory_allocated()
    assert left <= LEFT_BYTES, f"tests of earlier modules left {left / 2**30:.1f} GiB on the device"
    yield
    _free()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of what a failed test's frames hold, which pytest keeps until the next one fails: up to a whole GPU."""
    last = [vars(sys).pop(name, None) for name in ("last_type", "last_value", "last_traceback", "last_exc")]
    if last[1] is not None:
        release_frames(last[1])
        last.clear()
        _free()


@pytest.fixture(autouse=True)
def training_under_way(request) -> None:
    """Start training runs with the first test that may run beside them; where they do not fit, with one that waits."""
    if not is_alone(request.node) and fit_beside_tests():
        request.getfixturevalue("trained")


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory) -> Iterator[Trainings]:
    """Return the result of a `Training`; those that tests have as parameters are under way from the beginning."""
    kept = [item for item in request.session.items if not item.get_closest_marker("skip")]
    wanted = dict.fromkeys(training for item in kept for training in trainings_of(item))
    room = room_gb(several=any(training.ranks > 1 for training in wanted))
    at_once = 2 * max((room // training.gb for training in wanted), default=1)
    trainings = Trainings(tmp_path_factory.mktemp("trainings"), room, at_once)
    for training in sorted(wanted, key=lambda each: each.ranks, reverse=True):
        trainings.start(training)
    yield trainings
    trainings.close()


def is_alone(item: pytest.Item) -> bool:
    """Return whether a test has the GPU to itself: such tests come first, before training runs start."""
    return item.path.stem in SCRIPTS or item.get_closest_marker("alone") is not None


def turn_of(item: pytest.Item) -> int:
    """Return when a test comes: those alone first, and last what waits for training runs, which others run beside."""
    return 0 if is_alone(item) else 1 + bool(trainings_of(item))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := os.environ.get("GPU_TESTS_PART"):
        kept = part_of(items, part)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    items.sort(key=turn_of)
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
    ranks = max((training.ranks for training in trainings_of(item)), default=MOST_RANKS_PER_GPU)
    return ranks_per_gpu(ranks, MOST_RANKS_PER_GPU)


@pytest.fixture(scope="session")
def tower_module():
    os.environ["MASTER_PORT"] = str(free_port())
    # Something that it imports keeps the frames that import it: a test's frame would keep the test's model.
    import megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model  # noqa: F401

    from tests.models import tower

    tower.start_process()
    return tower


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    from tests.models import packed_parity

    with packed_parity.deterministic():
        yield


@pytest.fixture
def model(tower_module):
    made = tower_module.build_tower(layers=LAYERS)
    yield made
    made.__dict__.pop("forward", None)


@pytest.fixture(params=[False, True], ids=["plain", "expandable"])
def set_segments(request):
    """Return a function that sets how PyTorch makes segments, as loops do between generation and training."""
    change = torch.cuda.memory._set_allocator_settings
    yield partial(change, f"expandable_segments:{request.param}")
    change("expandable_segments:False")


@pytest.fixture
def grads(model, tower_module):
    return tower_module.MainGrads(model)


@pytest.fixture
def graphs_of(model):
    """Return a function that captures the model with the given options and returns its helper."""
    helpers = []

    def make(capture: bool = True, **options):
        helpers.append(vision_graphs(model, capture=False, **options))  # is taken away though its capture fails
        if capture:
            helpers[-1].create_cudagraphs()
        return helpers[-1]

    yield make
    for helper in helpers:
        helper.delete_cuda_graphs()
    torch.cuda.empty_cache()
