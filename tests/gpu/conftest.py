"""GPU tests: real graphs of Bridge's vision tower at full width, a few layers deep."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def tower_module():
    os.environ["MASTER_PORT"] = str(29600 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
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
