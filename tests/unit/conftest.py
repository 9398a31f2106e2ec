"""Tests of what is captured run on tape, as graphs do, some under the reference executor too; see `tests/tape.py`.

Tests of graphs that share memory run over pools; see `tests/pooled.py`.
"""

from itertools import count

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
    "test_parts_again",
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


@pytest.fixture(autouse=True, scope="session")
def host_states():
    from .recomputing import states_of_the_host

    with states_of_the_host():
        yield


@pytest.fixture
def again(monkeypatch):
    """Count how often recorded work runs what it recomputes once more."""
    from bridge_cg_plugin.upstream.kernels import recompute

    found = count()

    def counting(call):
        def counted_call(*args, **settings):
            place = next(place for place, each in enumerate(args) if callable(each))
            function, runs = args[place], count()

            def counted(*given):
                if next(runs):
                    next(found)
                return function(*given)

            return call(*args[:place], counted, *args[place + 1 :], **settings)

        return counted_call

    for owner in (recompute, recompute.WithoutOutput):
        monkeypatch.setattr(owner, "checkpoint", counting(owner.checkpoint))
    return found
