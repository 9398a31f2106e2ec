"""What a run with buckets on demand tells: their sizes for another run, and why a batch runs eager."""

import pytest

from bridge_cg_plugin.options import vision_options

from . import packs
from .growing import LARGE, ON_DEMAND, OTHER, SMALL, assert_equals_eager, capacities, grown
from .towers import forward, graphs_on, new_tower


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def options_again(graphs):
    """Return what the report says to write for the same buckets, by field."""
    (line,) = (line for line in graphs.report().splitlines() if line.startswith("next run: "))
    field, _, buckets = line.removeprefix("next run: ").split(" captures ")[0].partition("=")
    return {field: buckets}


def buckets_of(graphs):
    return sorted(graphs._regions[0].buckets)


def test_another_run_records_the_buckets_that_the_report_names_and_no_others(tower):
    graphs, stack = grown(tower, SMALL)
    with stack:
        for _ in range(4):
            with graphs.step():
                forward(tower, OTHER)
                forward(tower, LARGE)
        found, written = buckets_of(graphs), options_again(graphs)
        assert len(found) == 2
    named = vision_options({"vision_cuda_graph_impl": "transformer_engine", **written}).buckets
    with graphs_on(tower, buckets=named) as graphs:
        assert capacities(graphs) == sorted({bucket.tokens for bucket in found})
        assert_equals_eager(tower, graphs, LARGE)
        assert not graphs.statistics().fallbacks
    graphs, stack = grown(tower, LARGE, **{**ON_DEMAND, "buckets": named})
    with stack:
        for _ in range(4):
            with graphs.step():
                forward(tower, OTHER)
                forward(tower, SMALL)
        assert set(capacities(graphs)) <= set(named)


def test_packs_are_named_for_another_run():
    model, seen = packs.new_model(), [(300,), (100, 150, 50), (400, 200), (500, 90, 10), (400, 190)]
    common = {"cuda_graph_modules": ["attn"], "cuda_graph_impl": "transformer_engine"}
    with packs.graphs_on(model, packs.pack(seen[0]), **common, cuda_graph_packed_buckets="auto") as graphs:
        for seed, lengths in enumerate(seen):
            with graphs.step():
                packs.losses_and_gradients(model, packs.pack(lengths, seed))
        found, written = buckets_of(graphs), options_again(graphs)
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **written) as graphs:
        assert len(found) > 1 and capacities(graphs) == sorted({bucket.tokens for bucket in found})


NAMED = {"buckets": (64, 320), "exact_below": 256}


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


def test_frames_that_no_deterministic_bucket_takes_are_told(tower, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    large = [[1, 32, 42]] * 2
    graphs, stack = grown(tower, large)
    with stack:
        assert not capacities(graphs)
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
