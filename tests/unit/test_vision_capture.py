"""Captures that fail or have to fit a memory limit."""

import logging
from contextlib import contextmanager

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from bridge_cg_plugin.graphs.region import Region
from bridge_cg_plugin.upstream.encoders.layer_parts import AttentionPart, MlpPart
from bridge_cg_plugin.upstream.encoders.qwen3_vl import Qwen3VLEncoder

from .mixes import FITTING, IMAGES, MIXED, TOO_MANY_TOKENS
from .towers import assert_close, forward, graphs_on, new_tower, results, tower

AT_ONCE = {"buckets": "auto", "capture_mode": "at_once"}


def capture_failing(monkeypatch, error, program=Qwen3VLEncoder):
    def fail(*unused):
        raise error

    monkeypatch.setattr(program, "forward", fail)


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("made to fail"),
        RuntimeError("made to fail"),
        torch.OutOfMemoryError("made to fail"),
        TypeError("made to fail"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_failed_capture_goes_on_eager_with_one_warning(monkeypatch, caplog, error):
    model = new_tower()
    expected = results(model, MIXED)
    with graphs_on(model, capture=False, strict=False) as graphs:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
            capture_failing(patched, error)
            assert graphs.capture() is False
        warnings = [r for r in caplog.records if r.name == "bridge_cg_plugin"]
        assert len(warnings) == 1 and "made to fail" in warnings[0].getMessage()
        assert not graphs.captured
        caplog.clear()
        found = results(model, MIXED)
        assert not [r for r in caplog.records if r.name == "bridge_cg_plugin"]
        assert "made to fail" in graphs.report()
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


def test_a_failure_that_says_nothing_is_named(monkeypatch):
    with graphs_on(new_tower(), capture=False, strict=False) as graphs:
        capture_failing(monkeypatch, CaptureError())
        assert graphs.capture() is False
        assert graphs.failure == "CaptureError: "


@pytest.mark.parametrize("modules, program", [(("attn",), AttentionPart), (("mlp",), MlpPart)])
def test_a_failed_capture_of_layers_leaves_them_alone(monkeypatch, modules, program):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False, modules=modules) as graphs:
        capture_failing(monkeypatch, CaptureError("made to fail"), program)
        assert graphs.capture() is False
        for layer in model.decoder.layers:
            assert not {"_forward_attention", "_forward_mlp"} & set(layer.__dict__)
        results(model, MIXED)


def test_eager_microbatches_after_a_failed_capture_are_fallbacks_not_warm_up(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False) as graphs:
        forward(model, IMAGES)
        capture_failing(monkeypatch, CaptureError("made to fail"))
        graphs.capture()
        for _ in range(3):
            forward(model, IMAGES)
        assert graphs.statistics().warmup_microbatches == 1
        assert sum(graphs.statistics().fallbacks.values()) == 3


@pytest.mark.parametrize("mode", ["at_once", "on_demand"])
def test_a_capture_inside_inference_mode_serves_training_later(mode):
    model, sizes = new_tower(), ([[1, 8, 8]], [[1, 12, 8]])
    expected = [results(model, rows) for rows in sizes]
    with graphs_on(model, capture=False, buckets="auto", capture_mode=mode, cost_fallback=False) as graphs:
        with torch.inference_mode():
            for rows in sizes:
                forward(model, rows)
                assert graphs.captured or graphs.capture()
                for _ in range(20):
                    graphs.begin_step()
        for rows, (outputs, gradients) in zip(sizes, expected, strict=True):
            actual = results(model, rows)
            assert_close(actual[0], outputs)
            assert_close(actual[1], gradients)
        assert graphs.statistics().replays >= len(sizes)


def test_strict_stops_on_a_failed_capture(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=True) as graphs:
        capture_failing(monkeypatch, CaptureError("made to fail"))
        with pytest.raises(CaptureError, match="made to fail"):
            graphs.capture()
        assert not graphs.captured


def test_nothing_to_plan_from_is_a_failed_capture(caplog):
    with graphs_on(new_tower(), capture=False, strict=False, **AT_ONCE) as graphs:
        with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
            assert graphs.capture() is False
        assert "no microbatch was seen" in caplog.text
    with (
        graphs_on(new_tower(), capture=False, strict=True, **AT_ONCE) as graphs,
        pytest.raises(CaptureError, match="no microbatch was seen"),
    ):
        graphs.capture()


def test_memory_that_runs_out_while_planning_is_a_failed_capture(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False, buckets="auto") as graphs:
        forward(model, IMAGES)

        def fail(*unused):
            raise torch.OutOfMemoryError("made to fail")

        monkeypatch.setattr(graphs.workload.planned.plan, "capacity_limit", fail)
        assert graphs.capture() is False
        assert "made to fail" in graphs.report()


def test_a_capture_after_a_failed_one(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False) as graphs:
        with monkeypatch.context() as patched:
            capture_failing(patched, CaptureError("made to fail"))
            graphs.capture()
        assert graphs.capture() and graphs.failure is None
        forward(model, IMAGES)
        assert graphs.statistics().replays == 1


@contextmanager
def seen(model, **options):
    """Graphs with automatic buckets for all that may come, which saw `FITTING` and are not captured yet."""
    with graphs_on(model, capture=False, **AT_ONCE, **options) as graphs:
        for rows in FITTING:
            forward(model, rows)
        yield graphs


def test_automatic_buckets_reach_beyond_what_warm_up_showed(capsys):
    model = new_tower()
    with seen(model, headroom=1.25) as graphs:
        graphs.capture()
        assert graphs.workload.buckets.capacities[-1] == 320
        assert_close(forward(model, TOO_MANY_TOKENS), forward(tower(), TOO_MANY_TOKENS), 1e-5)
        assert graphs.statistics().replays == 1
    assert "no memory" not in capsys.readouterr().out


def assert_ends_with_what_was_seen(graphs, capsys):
    assert graphs.capture()
    assert graphs.workload.buckets.capacities[-1] == 256
    assert "no memory for vision_cuda_graph_tuning.headroom=1.25" in capsys.readouterr().out


def test_headroom_that_runs_out_of_memory_is_given_up(monkeypatch, capsys):
    with seen(new_tower()) as graphs:
        real = Region.capture

        def capture(region, progress):
            if max(bucket.tokens for bucket in region.buckets) > 256:
                raise OutOfMemoryInCapture("made to fail")
            real(region, progress)

        monkeypatch.setattr(Region, "capture", capture)
        assert_ends_with_what_was_seen(graphs, capsys)


def test_headroom_takes_no_memory_that_warm_up_steps_needed(monkeypatch, capsys):
    with seen(new_tower()) as graphs:
        monkeypatch.setattr(graphs.workload.planned, "_left_over", lambda manager: 0)
        assert_ends_with_what_was_seen(graphs, capsys)


def test_headroom_that_fails_otherwise_is_a_failed_capture(monkeypatch):
    with seen(new_tower()) as graphs:
        capture_failing(monkeypatch, CaptureError("made to fail"))
        with pytest.raises(CaptureError, match="made to fail"):
            graphs.capture()


@pytest.mark.parametrize("options", [{"headroom": 1.0}, {"max_seq_length": 256}], ids=["off", "largest given"])
def test_without_headroom_buckets_end_with_what_was_seen_or_given(options):
    with seen(new_tower(), **options) as graphs:
        graphs.capture()
        assert graphs.workload.buckets.capacities[-1] == 256


def largest_within(model, gigabytes):
    """Return the largest capacity captured within the limit, and the memory that took in GiB."""
    with seen(model, buckets_max_gb=gigabytes, headroom=1.0) as graphs:
        graphs.capture()
        return graphs.workload.buckets.capacities[-1], graphs.statistics().memory_bytes / 2**30


def test_a_memory_limit_shrinks_the_largest_bucket_until_it_holds():
    model = new_tower()
    free, used = largest_within(model, 1.0)
    assert free == 256
    limit = used * 0.6
    shrunk, used = largest_within(model, limit)
    assert 0 < shrunk < free and used <= limit


def test_a_memory_limit_that_nothing_fits_is_a_failed_capture():
    with pytest.raises(CaptureError, match="buckets_max_gb"):
        largest_within(new_tower(), 1e-9)
