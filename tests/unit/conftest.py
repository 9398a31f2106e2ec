"""Tests of what is captured run on the tape, and the first of each kind under both executors that need no GPU."""

import pytest

from ..executors import KINDS, choose

# The reference executor runs a model's Python in every replay; the tape runs none, as a graph, and so shows more.
ON_TAPE = (
    "test_encoder_plugins",
    "test_encoders",
    "test_growing",
    "test_offload_store",
    "test_packed",
    "test_packed_experts",
    "test_packed_hybrid",
    "test_packed_offload",
    "test_vision",
    "test_vision_gradients",
    "test_vision_lifecycle",
    "test_vision_offload",
)


def pytest_generate_tests(metafunc):
    marked = metafunc.definition.get_closest_marker
    if metafunc.module.__name__.rpartition(".")[2] in ON_TAPE and not marked("reference_executor"):
        kinds = KINDS if marked("both_executors") else ["tape"]
        metafunc.parametrize("executor_kind", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def executor_kind(request):
    kind = getattr(request, "param", "reference")
    choose(kind)
    yield kind
    choose("reference")
