"""Captures that fail or have to fit a memory limit."""

import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.upstream.encoders.qwen3_vl import Qwen3VLEncoder

from .mixes import IMAGES
from .towers import assert_close, forward, graphs_on, new_tower, results


def capture_failing(monkeypatch, error, program=Qwen3VLEncoder):
    def fail(*unused):
        raise error

    monkeypatch.setattr(program, "forward", fail)


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


def test_a_capture_inside_inference_mode_serves_training_later():
    model, sizes = new_tower(), ([[1, 8, 8]], [[1, 12, 8]])
    expected = [results(model, rows) for rows in sizes]
    with graphs_on(model, capture=False, buckets="auto") as graphs:
        with torch.inference_mode():
            for rows in sizes:
                forward(model, rows)
                assert graphs.captured or graphs.capture()
                for _ in range(4):
                    graphs.begin_step()
        for rows, (outputs, gradients) in zip(sizes, expected, strict=True):
            actual = results(model, rows)
            assert_close(actual[0], outputs)
            assert_close(actual[1], gradients)
        assert graphs.statistics().replays >= len(sizes)
