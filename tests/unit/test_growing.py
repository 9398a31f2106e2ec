"""Buckets that are recorded on demand: what microbatches ask for, one a step, each equal to eager."""

import gc
import logging
from contextlib import ExitStack

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.graphs.errors import CaptureError, Refused
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.region import Region
from bridge_cg_plugin.options import vision_options
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper

from ..ranks import run_ranks
from . import packs
from .growing import LARGE, ON_DEMAND, OTHER, SMALL, assert_equals_eager, capacities, grown
from .towers import DEFAULTS, VisionGraphOptions, assert_close, forward, graphs_on, new_tower

LEAST_BYTES = 1024


@pytest.fixture(scope="module")
def tower():
    return new_tower()


VIDEO = [[90, 4, 4]]


@pytest.mark.parametrize("rows, options", [(LARGE, {}), (VIDEO, {"max_frames": "auto"})], ids=["tokens", "frames"])
def test_what_warm_up_did_not_show_runs_eager_once_and_is_recorded_before_the_next_step(tower, rows, options):
    graphs, stack = grown(tower, SMALL, **options)
    with stack:
        with graphs.step():
            assert_equals_eager(tower, graphs, SMALL)
            assert_equals_eager(tower, graphs, rows)
            graphs.before_evaluation()  # which records nothing inside a step
            assert capacities(graphs) == [64]
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1}
        before = graphs.statistics().replays
        for seed in range(3):
            with graphs.step():
                assert_equals_eager(tower, graphs, rows, seed)
                assert_equals_eager(tower, graphs, SMALL, seed)
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1}
        regions = len(graphs._regions)
        assert len(capacities(graphs)) == 2
        assert graphs.statistics().replays == before + 6 * regions
        found = graphs.statistics()
        assert found.pause_seconds == found.longest_pause > 0


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
        assert {mode.gradients for _, bucket, mode in region.sources.current.recordings if bucket.tokens == 384} == {
            False,
            True,
        }


def test_a_bucket_is_recorded_for_every_microbatch_in_flight_once_none_is(tower):
    graphs, stack = grown(tower, SMALL, slots=2)
    with stack:
        with graphs.step():
            held = forward(tower, SMALL)
            forward(tower, LARGE, 1)
        graphs.begin_step()  # nothing is recorded while it is in flight
        recordings = graphs._regions[0].sources.current.recordings
        assert {(slot, bucket.tokens) for slot, bucket, _ in recordings} == {(0, 64), (1, 64)}
        sum(o.sum() for o in held).backward()
        with graphs.step():
            pair = forward(tower, LARGE), forward(tower, LARGE, 1)
            sum(o.sum() for outputs in pair for o in outputs).backward()
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


def fails(graphs):
    Region.record = lambda *unused: (_ for _ in ()).throw(torch.OutOfMemoryError("none left"))


SEEN = (SMALL, LARGE, LARGE, OTHER, LARGE, SMALL)


def grow_with_other_ranks(hinder):
    """Grow on several ranks, of which one is hindered."""
    model = new_tower()
    options = VisionGraphOptions(**{**DEFAULTS, **ON_DEMAND, "strict": False})
    helper = encoder_helper(model, model.config, options=options)
    forward(model, SMALL)
    helper.create_cudagraphs()
    graphs, found = helper.graphs, []
    if hinder is not None and distributed.get_rank() == 1:
        hinder(graphs)
    for seed, rows in enumerate(SEEN):
        with graphs.step():
            found.append([o.detach() for o in forward(model, rows, seed)])
    return found, capacities(graphs), dict(graphs.statistics().fallbacks)


@pytest.mark.reference_executor
@pytest.mark.parametrize("hinder", [None, fails])
def test_ranks_that_share_layers_record_alike(tmp_path, hinder):
    ranks = run_ranks(2, grow_with_other_ranks, tmp_path, hinder, tensor_model_parallel_size=2)
    assert ranks[0][1:] == ranks[1][1:]
    assert max(ranks[0][1]) >= 384 if hinder is None else max(ranks[0][1]) < 384
    whole = new_tower()
    for seed, rows in enumerate(SEEN):
        for found, _, _ in ranks:
            assert_close(found[seed], [o.detach() for o in forward(whole, rows, seed)], 1e-4)


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


def test_packs_are_recorded_on_demand_and_named_for_another_run():
    model = packs.new_model()
    seen = [(300,), (100, 150, 50), (400, 200), (300,), (7, 290), (12,) * 25, (400, 190)]
    common = {"cuda_graph_modules": ["attn"], "cuda_graph_impl": "transformer_engine"}
    grown = {"cuda_graph_packed_buckets": "auto", "cuda_graph_max_packed_seqs": "auto"}
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **grown) as graphs:
        for seed, lengths in enumerate(seen):
            batch = packs.pack(lengths, seed)
            with graphs.step():
                packs.assert_same(packs.losses_and_gradients(model, batch), packs.eager(model, graphs, batch))
        assert set(graphs.statistics().fallbacks) <= {"not_captured_yet"}
        assert graphs.statistics().replays >= 4 * len(graphs._regions)
        found, written = buckets_of(graphs), options_again(graphs)
    with packs.graphs_on(model, packs.pack(seen[0]), **common, **written) as graphs:
        assert len(found) > 1 and capacities(graphs) == sorted({bucket.tokens for bucket in found})


NAMED = {"buckets": (64, 320), "exact_below": 256}


@pytest.mark.parametrize(
    "rows, reason, options, deterministic",
    [
        ([[17, 4, 4]], "too_many_frames", {}, False),
        ([[1, 16, 8]], "too_few_tokens", NAMED, False),
        ([[1, 32, 42]] * 2, "frame_too_large", {}, True),
    ],
)
def test_what_no_bucket_will_take_is_told_by_what_speaks_against_those_that_could_be_recorded(
    tower, rows, reason, options, deterministic, monkeypatch
):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", str(int(not deterministic)))
    graphs, stack = grown(tower, rows if deterministic else SMALL, **options)
    with stack:
        assert bool(capacities(graphs)) != deterministic
        for _ in range(3):
            with graphs.step():
                forward(tower, rows)
        assert dict(graphs.statistics().fallbacks) == {reason: 3 * len(graphs._regions)}


def test_no_garbage_is_collected_while_a_step_waits_for_a_capture(tower, monkeypatch):
    collecting = []

    def noted(*args):
        collecting.append(gc.isenabled())
        warm_up(*args)

    warm_up = ReferenceExecutor.warm_up
    monkeypatch.setattr(ReferenceExecutor, "warm_up", noted)
    graphs, stack = grown(tower, SMALL)
    with stack:
        assert collecting == [False] and gc.isenabled()
        for _ in range(2):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE)
        assert collecting == [False, False] and gc.isenabled()
        monkeypatch.setattr(ReferenceExecutor, "warm_up", lambda *args: 1 / 0)
        with pytest.raises(CaptureError):
            graphs.capture()
        assert gc.isenabled()


@pytest.mark.reference_executor
def test_two_towers_record_one_bucket_each_before_a_step_and_equal_eager():
    towers = [new_tower(), new_tower()]
    (first, stack), (second, other) = (grown(tower, SMALL) for tower in towers)
    both = [first, second]
    with stack, other:
        for wanted in (1, 2, 2):
            with ExitStack() as step:
                for graphs in both:
                    step.enter_context(graphs.step())
                assert [len(capacities(graphs)) for graphs in both] == [wanted] * 2
                for tower, graphs in zip(towers, both, strict=True):
                    assert_equals_eager(tower, graphs, LARGE)
        pauses = [graphs.statistics() for graphs in both]
        assert all(each.pause_seconds == each.longest_pause > 0 for each in pauses)
