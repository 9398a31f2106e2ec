"""Buckets that were recorded on demand are named for another run, which records them alone."""

import pytest

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.options import vision_options

from . import packs
from .growing import LARGE, ON_DEMAND, OTHER, SMALL, assert_equals_eager, grown
from .mixes import MODULES
from .towers import forward, graphs_on, new_tower


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def options_again(graphs):
    """Return what the report says to write for the same buckets, by field."""
    (line,) = (line for line in graphs.report().splitlines() if line.startswith("next run: "))
    words = line.removeprefix("next run: ").split(" names the same")[0].split()
    return dict(word.split("=", 1) for word in words)


def buckets_of(graphs):
    return sorted(graphs._regions[0].buckets)


@pytest.mark.parametrize("modules", MODULES)
def test_another_run_records_the_buckets_that_the_report_names_and_no_others(tower, modules):
    graphs, stack = grown(tower, SMALL, modules=modules)
    with stack:
        for _ in range(4):
            with graphs.step():
                forward(tower, OTHER)
                forward(tower, LARGE)
        found, written = buckets_of(graphs), options_again(graphs)
        assert len(found) == 2
    read = vision_options({"vision_cuda_graph_impl": "transformer_engine", **written})
    named = {"buckets": read.buckets, "bucket_limits": read.bucket_limits}
    with graphs_on(tower, modules=modules, **named) as graphs:
        assert buckets_of(graphs) == found
        assert_equals_eager(tower, graphs, LARGE)
        assert not graphs.statistics().fallbacks
    graphs, stack = grown(tower, LARGE, modules=modules, **{**ON_DEMAND, **named})
    with stack:
        for _ in range(4):
            with graphs.step():
                forward(tower, OTHER)
                forward(tower, SMALL)
        assert set(buckets_of(graphs)) <= set(found)


def test_limits_of_another_encoder_are_refused(tower):
    said = "a bucket of this encoder is written as 64/.*, not 64/1"
    graphs_there = graphs_on(tower, buckets=(64,), bucket_limits=((64, 1),), capture=False)
    with graphs_there as graphs, pytest.raises(CaptureError, match=said):
        graphs.capture()


@pytest.mark.parametrize("modules", [[], ["attn"]])
def test_packs_are_named_for_another_run(modules):
    model, seen = packs.new_model(), [(300,), (100, 150, 50), (400, 200), (500, 90, 10), (400, 190)]
    common = {"cuda_graph_modules": modules, "cuda_graph_impl": "transformer_engine"}
    auto = {"cuda_graph_packed_buckets": "auto", "cuda_graph_packed_tuning": {"capture_mode": "on_demand"}}
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **auto) as graphs:
        for seed, lengths in enumerate(seen):
            with graphs.step():
                packs.losses_and_gradients(model, packs.pack(lengths, seed))
        found, written = buckets_of(graphs), options_again(graphs)
    limits = written.pop("cuda_graph_packed_tuning.bucket_limits")
    named = {**written, "cuda_graph_packed_tuning": {"bucket_limits": limits}}
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **named) as graphs:
        assert len(found) > 1 and buckets_of(graphs) == found
