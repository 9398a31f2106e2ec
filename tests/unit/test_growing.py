"""Buckets that are recorded on demand: what microbatches ask for, one a step, each equal to eager."""

import gc
import logging
import weakref

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError, Refused
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.joint_step import before_evaluation
from bridge_cg_plugin.graphs.region import Region
from bridge_cg_plugin.upstream.hooks.helpers import VisionTECudaGraphHelper

from ..ranks import run_ranks
from . import packs
from .growing import LARGE, ON_DEMAND, OTHER, SMALL, assert_equals_eager, capacities, grown
from .towers import DEFAULTS, VisionGraphOptions, assert_close, draw, forward, new_tower

LEAST_BYTES = 1024


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def test_what_warm_up_did_not_show_runs_eager_once_and_is_recorded_before_the_next_step(tower):
    graphs, stack = grown(tower, SMALL)
    with stack:
        assert capacities(graphs) == [64]
        with graphs.step():
            assert_equals_eager(tower, graphs, SMALL)
            assert_equals_eager(tower, graphs, LARGE)
        assert set(graphs.statistics().fallbacks) == {"not_captured_yet"}
        before = graphs.statistics().replays
        for seed in range(3):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE, seed)
                assert_equals_eager(tower, graphs, SMALL, seed)
        regions = len(graphs._regions)
        assert len(capacities(graphs)) == 2
        assert graphs.statistics().replays == before + 6 * regions
        assert list(graphs.statistics().pauses) == [2] and graphs.statistics().longest_pause > 0


def test_frames_grow_as_tokens_do(tower):
    graphs, stack = grown(tower, SMALL, max_frames="auto")
    with stack:
        for seed in range(4):
            with graphs.step():
                assert_equals_eager(tower, graphs, [[300, 2, 2]], seed)
                assert_equals_eager(tower, graphs, SMALL, seed)
        regions = len(graphs._regions)
        assert graphs.statistics().fallbacks == {"not_captured_yet": regions}
        assert graphs.statistics().replays == 7 * regions


def test_nothing_but_text_in_warm_up(tower):
    graphs, stack = grown(tower)
    with stack:
        assert graphs.captured and not capacities(graphs)
        for seed in range(2):
            with graphs.step():
                assert_equals_eager(tower, graphs, SMALL, seed)
        assert graphs.statistics().replays == 1


def test_a_size_of_evaluation_alone_is_no_reason_for_a_backward(tower):
    graphs, stack = grown(tower, SMALL)
    with stack:
        (region,) = graphs._regions
        for _ in range(2):
            with torch.no_grad():
                tower.eval()
                graphs.before_evaluation()
                forward(tower, LARGE)  # the last one of an evaluation is recorded in the next evaluation
                tower.train()
            for seed in range(2):
                with graphs.step():
                    assert_equals_eager(tower, graphs, SMALL, seed)
        modes = {(bucket.tokens, mode.gradients) for _, bucket, mode in region.sources.current.recordings}
        assert modes == {(64, True), (384, False)}
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1}
        for seed in range(4):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE, seed)
        assert graphs.statistics().fallbacks == {"not_captured_yet": 2}


def test_evaluation_records_nothing_inside_a_step(tower):
    graphs, stack = grown(tower, SMALL)
    with stack:
        with graphs.step():
            assert_equals_eager(tower, graphs, LARGE)
            before_evaluation([graphs])
        assert capacities(graphs) == [64]


def test_a_second_microbatch_in_flight_gets_its_recording_before_a_later_step(tower):
    graphs, stack = grown(tower, SMALL, slots=2)
    with stack:
        with graphs.step():
            first, second = forward(tower, SMALL), forward(tower, SMALL, 1)
        graphs.begin_step()  # nothing is recorded while they are in flight
        assert {place[0] for place in graphs._regions[0].sources.current.recordings} == {0}
        sum(o.sum() for o in (*first, *second)).backward()
        with graphs.step():
            first, second = forward(tower, SMALL), forward(tower, SMALL, 1)
            sum(o.sum() for o in (*first, *second)).backward()
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1}
        assert graphs.statistics().replays == 3


NO_MEMORY = CaptureError("no memory")


@pytest.mark.parametrize(
    "strict, error, reason",
    [
        (False, NO_MEMORY, Fallback.CAPTURE_FAILED),
        (True, NO_MEMORY, Fallback.CAPTURE_FAILED),
        (False, Refused(Fallback.MODEL_CHANGED, "no memory"), Fallback.MODEL_CHANGED),
    ],
)
def test_a_recording_that_fails_leaves_the_run_on_the_graphs_that_it_has(
    tower, caplog, monkeypatch, strict, error, reason
):
    graphs, stack = grown(tower, SMALL, strict=strict)
    record = Region.record

    def fail(self, *what):
        record(self, *what)
        raise error

    with stack, caplog.at_level(logging.WARNING):
        with graphs.step():
            assert_equals_eager(tower, graphs, LARGE)
        static_bytes = graphs.statistics().static_bytes
        monkeypatch.setattr(Region, "record", fail)
        if strict:
            with pytest.raises(CaptureError, match=r"bucket \d+.* could not be captured: CaptureError: no memory"):
                graphs.begin_step()
            return
        for seed in range(3):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE, seed)
                assert_equals_eager(tower, graphs, SMALL, seed)
        assert capacities(graphs) == [64] and graphs.statistics().replays == 3
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1, reason: 3}
        assert graphs.statistics().static_bytes == static_bytes
        assert sum("could not be captured" in record.message for record in caplog.records) == 1


def records_a_larger_bucket(graphs):
    graphs.begin_step()


def records_for_a_changed_model(graphs):
    with pytest.MonkeyPatch.context() as patch, graphs.step():
        patch.setattr(graphs.model.decoder.layers[0], "eps", 0.5, raising=False)
        graphs.model(*draw(SMALL))


@pytest.mark.parametrize("records", [records_a_larger_bucket, records_for_a_changed_model])
def test_memory_of_a_recording_that_fails_goes_back(tower, monkeypatch, records):
    """Memory that can leave the device goes back when it is looked at, and nothing may hold it then."""
    graphs, stack = grown(tower, SMALL, strict=False)
    bodies, free = [], []

    def fail(executor, body, pool):
        bodies.append(weakref.ref(body))
        body.forward()
        raise torch.OutOfMemoryError("made to fail")

    with stack:
        with graphs.step():
            assert_equals_eager(tower, graphs, LARGE)
        monkeypatch.setattr(type(graphs.executor), "record_forward", fail)
        monkeypatch.setattr(
            type(graphs.executor), "tidy", lambda executor: free.append(all(body() is None for body in bodies))
        )
        gc.collect()
        gc.disable()
        try:
            records(graphs)
            assert bodies and free[-1]
        finally:
            gc.enable()


def test_packs():
    modules, model, seen = (
        ["attn"],
        packs.new_model(),
        [(300,), (100, 150, 50), (400, 200), (300,), (7, 290), (12,) * 25, (400, 190)],
    )
    options = {
        "cuda_graph_packed_buckets": "auto",
        "cuda_graph_max_packed_seqs": "auto",
        "cuda_graph_modules": modules,
        "cuda_graph_impl": "transformer_engine",
    }
    with packs.graphs_on(model, packs.pack(seen[0]), **options) as graphs:
        for seed, lengths in enumerate(seen):
            with graphs.step():
                batch = packs.pack(lengths, seed)
                actual = packs.losses_and_gradients(model, batch)
                with graphs.paused():
                    expected = packs.losses_and_gradients(model, batch)
                assert_close([actual[0]], [expected[0]])
                assert_close(actual[1], expected[1])
        assert set(graphs.statistics().fallbacks) <= {"not_captured_yet"}
        assert graphs.statistics().replays >= 4 * len(graphs._regions)


def grow_with_other_ranks(fails_on_rank):
    from torch import distributed

    model = new_tower()
    helper = VisionTECudaGraphHelper(
        model, model.config, options=VisionGraphOptions(**{**DEFAULTS, **ON_DEMAND, "strict": False})
    )
    forward(model, SMALL)
    helper.create_cudagraphs()
    graphs, found = helper.graphs, []
    if distributed.get_rank() == fails_on_rank:
        Region.record = lambda *unused: (_ for _ in ()).throw(torch.OutOfMemoryError("none left"))
    for seed, rows in enumerate((SMALL, LARGE, LARGE, OTHER, LARGE, SMALL)):
        with graphs.step():
            found.append([o.detach() for o in forward(model, rows, seed)])
    return found, capacities(graphs), dict(graphs.statistics().fallbacks)


@pytest.mark.reference_executor
@pytest.mark.parametrize("fails_on_rank", [None, 1])
def test_ranks_that_share_layers_record_alike(tmp_path, fails_on_rank):
    ranks = run_ranks(2, grow_with_other_ranks, tmp_path, fails_on_rank, tensor_model_parallel_size=2)
    assert ranks[0][1:] == ranks[1][1:]
    assert ranks[0][1] == [64] if fails_on_rank == 1 else len(ranks[0][1]) > 1
    whole = new_tower()
    for seed, rows in enumerate((SMALL, LARGE, LARGE, OTHER, LARGE, SMALL)):
        for found, _, _ in ranks:
            assert_close(found[seed], [o.detach() for o in forward(whole, rows, seed)], 1e-4)
