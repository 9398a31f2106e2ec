"""What the report and the loggers are told."""

import gc

import pytest

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports.report import metrics_of_ranks
from bridge_cg_plugin.graphs.reports.statistics import EagerRun

from .mixes import EXACT, IMAGES, TOO_MANY_FRAMES, TOO_MANY_TOKENS
from .towers import forward, graphs_on, new_tower, results


def test_report_names_replays_fallbacks_and_plan():
    model = new_tower()
    with graphs_on(model) as graphs:
        for rows in (IMAGES, IMAGES, TOO_MANY_TOKENS, TOO_MANY_FRAMES):
            forward(model, rows)
            gc.collect()
        text = graphs.report()
    row = next(line for line in text.splitlines() if line.split()[0].startswith("64/16/64"))
    assert row.split()[1] == "2"
    assert "too_many_frames 1" in text and "too_many_tokens 1" in text
    assert "plan: buckets 32, 64, 128, 256 tokens" in text


@pytest.mark.parametrize("modules", [(), ("mlp",)], ids=str)
def test_the_report_says_in_which_step_what_fell_back(modules):
    model = new_tower()
    with graphs_on(model, modules=modules) as graphs:
        for rows in (IMAGES, TOO_MANY_TOKENS):
            with graphs.step():
                forward(model, rows)
        with graphs.step():
            model.eval()
            forward(model, TOO_MANY_TOKENS)
        last = graphs.statistics().last_fallbacks
    size = sum(t * h * w for t, h, w in TOO_MANY_TOKENS)
    assert list(last) == [EagerRun(step, Fallback.TOO_MANY_TOKENS, size) for step in (2, 3)]


def test_report_without_fallbacks_says_so():
    with graphs_on(new_tower()) as graphs:
        assert "eager fallbacks: none" in graphs.report()


def test_metrics_tags_and_values():
    model = new_tower()
    with graphs_on(model) as graphs:
        results(model, EXACT)
        results(model, [[1, 8, 6]])
        results(model, TOO_MANY_TOKENS)
        found = metrics_of_ranks([graphs.statistics()], graphs.workload.group)
    assert found["vision_cuda_graph/replays"] == 2
    assert found["vision_cuda_graph/fallbacks"] == 1
    assert found["vision_cuda_graph/fallback/too_many_tokens"] == 1
    assert found["vision_cuda_graph/replayed_share"] == pytest.approx(2 / 3)
    assert found["vision_cuda_graph/padding_share"] == pytest.approx(16 / 128)
    assert found["vision_cuda_graph/memory_gb"] > 0
    assert all(isinstance(v, float) and tag.startswith("vision_cuda_graph/") for tag, v in found.items())


def test_metrics_before_capture_are_zero():
    with graphs_on(new_tower(), capture=False) as graphs:
        assert set(metrics_of_ranks([graphs.statistics()], graphs.workload.group).values()) == {0.0}


def test_the_report_counts_buckets_that_were_not_used():
    model = new_tower()
    with graphs_on(model) as graphs:
        assert "buckets not used: 4" in graphs.report()
        forward(model, IMAGES)
        assert "buckets not used: 3" in graphs.report()
