"""Pausing, detaching, loading and capturing anew."""

from dataclasses import replace

import pytest
import torch

from .mixes import IMAGES, MIXED
from .towers import assert_close, forward, graphs_on, new_tower, results


def test_detach_gives_the_encoder_its_own_forward_back():
    model = new_tower()
    own = model.forward
    expected = results(model, MIXED)
    with graphs_on(model):
        assert model.forward != own
    assert "forward" not in model.__dict__
    assert model.forward == own
    for layer in model.decoder.layers:
        assert not {"_forward_attention", "_forward_mlp"} & set(layer.__dict__)
    found = results(model, MIXED)
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


def test_a_forward_that_was_on_the_instance_comes_back():
    """Another tool's wrapper, say: it was there before the graphs and is there after them."""
    model = new_tower()
    theirs = model.forward = lambda *args, own=model.forward: own(*args)
    with graphs_on(model, strict=False, capture=False) as graphs:
        assert not graphs.capture()  # graphs would go around it
        forward(model, IMAGES)
    assert model.__dict__.get("forward") is theirs


def test_a_module_that_is_compiled_replays(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch.compiler.reset()
    model = new_tower()
    with graphs_on(model) as graphs:
        torch.compile(forward, backend="eager")(model, IMAGES)
        assert graphs.statistics().replays == 1


@pytest.mark.both_executors
def test_weights_loaded_after_capture_are_used():
    model, other = new_tower(0), new_tower(1)
    with graphs_on(model) as graphs:
        model.load_state_dict(other.state_dict())
        found = results(model, MIXED)
        assert graphs.statistics().replays == 1
    expected = results(other, MIXED)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_an_eager_pass_waits_for_parameters_as_a_replay_does():
    """Gathers of all ranks go over one communicator, so they must start in one order, whatever a rank runs."""
    model, waited = new_tower(), []
    with graphs_on(model, capture=False) as graphs:
        graphs.surroundings = replace(graphs.surroundings, before_replay=lambda: waited.append(1))
        forward(model, IMAGES)
        assert waited
        graphs.capture()
        for rows in (IMAGES, [(1, 20, 20)]):
            waited.clear()
            forward(model, rows)
            assert waited
        graphs.reset()
        graphs.failure = "made to fail"
        waited.clear()
        forward(model, IMAGES)
        assert waited


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
