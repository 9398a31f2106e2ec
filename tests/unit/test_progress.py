"""The ranges that a profile has."""

import torch
from torch.profiler import ProfilerActivity, profile

from bridge_cg_plugin.graphs import ranges

from .towers import forward, graphs_on, loss_of, new_tower


def ranges_of(run):
    """Return the names of the plugin's ranges in a profile of a function."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return {event.key for event in found.key_averages() if event.key.startswith("bridge-cg ")}


def test_a_profile_has_ranges_of_captures_microbatches_and_replays():
    model = new_tower()
    with graphs_on(model, capture=False, buckets=(32, 64)) as graphs:
        captures = ranges_of(graphs.capture)
        assert "bridge-cg capture vision_encoder, bucket 64/16/64" in captures, captures

        def train():
            with graphs.step():
                loss_of(forward(model, [(1, 4, 4)])).backward()

        assert ranges_of(train) == {
            "bridge-cg microbatch, encoder, 16 tokens",
            "bridge-cg replay vision_encoder, bucket 32/16/32",
            "bridge-cg replay vision_encoder, backward",
        }
        train()
        assert not ranges.on


def test_without_a_profile_a_range_is_nothing(monkeypatch):
    marks = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("end"))
    with ranges.named_range("replay"):
        assert marks == []
    monkeypatch.setattr(ranges, "UNDER_NSIGHT", True)
    with ranges.named_range("replay"):
        assert marks == ["bridge-cg replay"]
    assert marks == ["bridge-cg replay", "end"]
