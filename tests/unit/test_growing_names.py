"""Buckets that were captured on demand are named for another run, which captures their sizes at once."""

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


@pytest.mark.parametrize("modules", [[], ["attn"]])
def test_packs_are_named_for_another_run(modules):
    model, seen = packs.new_model(), [(300,), (100, 150, 50), (400, 200), (500, 90, 10), (400, 190)]
    common = {"cuda_graph_modules": modules, "cuda_graph_impl": "transformer_engine"}
    with packs.graphs_on(model, packs.pack(seen[0]), **common, cuda_graph_packed_buckets="auto") as graphs:
        for seed, lengths in enumerate(seen):
            with graphs.step():
                packs.losses_and_gradients(model, packs.pack(lengths, seed))
        found, written = buckets_of(graphs), options_again(graphs)
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **written) as graphs:
        assert len(found) > 1 and capacities(graphs) == sorted({bucket.tokens for bucket in found})
