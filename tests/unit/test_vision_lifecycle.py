"""Pausing, detaching, loading and capturing anew."""

from dataclasses import replace

import pytest

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


def test_paused_runs_eager_and_keeps_the_graphs():
    """Parameters and the names of a checkpoint are the model's own all the while."""
    model = new_tower()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    with graphs_on(model) as graphs:
        with graphs.paused():
            with graphs.paused():
                forward(model, IMAGES)
            forward(model, IMAGES)
            assert graphs.statistics().replays == 0
        forward(model, IMAGES)
        assert graphs.statistics().replays == 1 and list(model.state_dict()) == keys
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        with graphs.paused():
            graphs.detach()
        assert "forward" not in vars(model)


@pytest.mark.both_executors
def test_recapture_replays_the_new_graphs():
    model = new_tower()
    expected = results(model, MIXED)
    with graphs_on(model) as graphs:
        first = graphs._regions
        assert graphs.capture()
        assert all(not r.slots for r in first)
        found = results(model, MIXED)
        assert_close(found[1], expected[1])
        assert graphs.statistics().replays == 1


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
