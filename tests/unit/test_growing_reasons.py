"""Why a batch runs eager while buckets are recorded on demand: its own comes later, or none will take it."""

import pytest

from . import packs
from .growing import SMALL, capacities, grown
from .towers import forward, new_tower

NAMED = {"buckets": (64, 320), "exact_below": 256}


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def assert_runs_eager(model, graphs, rows, reason):
    for _ in range(3):
        with graphs.step():
            forward(model, rows)
    assert dict(graphs.statistics().fallbacks) == {reason: 3 * len(graphs._regions)}


@pytest.mark.parametrize(
    "rows, reason, options", [([[17, 4, 4]], "too_many_frames", {}), ([[1, 16, 8]], "too_few_tokens", NAMED)]
)
def test_what_no_bucket_will_take_is_told_by_what_speaks_against_those_that_could_be_recorded(
    tower, rows, reason, options
):
    graphs, stack = grown(tower, SMALL, **options)
    with stack:
        assert_runs_eager(tower, graphs, rows, reason)


@pytest.mark.parametrize("warmup", [[], [SMALL]], ids=["no buckets", "a smaller one"])
def test_frames_that_no_deterministic_bucket_takes_are_told(tower, monkeypatch, warmup):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    large = [[1, 32, 42]] * 2
    graphs, stack = grown(tower, *warmup or [large])
    with stack:
        assert len(capacities(graphs)) == len(warmup)
        assert_runs_eager(tower, graphs, large, "frame_too_large")


@pytest.mark.parametrize("modules", [[], ["attn"]])
def test_packs_that_no_bucket_will_take_are_told_why(modules):
    model = packs.new_model()
    options = {
        "cuda_graph_packed_buckets": "auto",
        "cuda_graph_modules": modules,
        "cuda_graph_impl": "transformer_engine",
    }
    with packs.graphs_on(model, packs.pack((300,)), **options) as graphs:
        for seed in range(2):
            with graphs.step():
                packs.losses_and_gradients(model, packs.pack((60,) * 7, seed))
        assert graphs.statistics().fallbacks == {"too_many_documents": 2}
