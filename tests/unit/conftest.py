"""Tests of what is captured run on tape, as graphs do, some under the reference executor too; see `tests/tape.py`.

Tests of graphs that share memory run over pools; see `tests/pooled.py`.
"""

import pytest

from bridge_cg_plugin.graphs.proofs import schedule

from ..executors import choose

IN_POOLS = ("test_chain", "test_packed_delta_nets")
ON_TAPE = (
    "test_encoder_plugins",
    "test_encoders",
    "test_growing",
    "test_offload_store",
    "test_packed",
    "test_packed_experts",
    "test_packed_fp8",
    "test_packed_fp8_parameters",
    "test_packed_hybrid",
    "test_packed_offload",
    "test_packed_parts",
    "test_vision",
)


def pytest_generate_tests(metafunc):
    module = metafunc.module.__name__.rpartition(".")[2]
    marked = metafunc.definition.get_closest_marker
    if module in (*ON_TAPE, *IN_POOLS) and not marked("reference_executor"):
        first = "pooled" if module in IN_POOLS else "tape"
        kinds = [first, "reference"] if marked("both_executors") else [first]
        metafunc.parametrize("executor_kind", kinds, indirect=True, scope="module")


@pytest.fixture
def first_proofs(monkeypatch):
    """Compare the first replays of recordings at once, whatever that takes."""
    monkeypatch.setattr(schedule, "FIRST_SHARE", 1e9)


@pytest.fixture(scope="module", autouse=True)
def executor_kind(request):
    kind = getattr(request, "param", "reference")
    choose(kind)
    yield kind
    choose("reference")
