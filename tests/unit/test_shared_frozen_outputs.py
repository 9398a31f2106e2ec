import logging

import pytest
import torch
from torch import nn

from .frozen_towers import IMAGES, activate, counts, frozen_tower, on_graphs
from .towers import assert_close, forward

pytestmark = pytest.mark.usefixtures("frozen_store_of_its_own")


def test_a_policy_and_its_reference_share_outputs_once_they_were_compared():
    policy, reference = frozen_tower(), frozen_tower()
    expected = [forward(policy, IMAGES, seed) for seed in range(3)]
    with on_graphs(policy) as first, on_graphs(reference) as second:
        for seed in range(3):
            for model in (policy, reference):
                assert_close(forward(model, IMAGES, seed), expected[seed])
        assert counts(first) == (0, 3)
        assert counts(second) == (2, 1), "the first of its microbatches was computed and compared"


def test_models_that_compute_something_else_with_the_same_weights_do_not_share():
    policy, other = frozen_tower(), frozen_tower()
    for layer in other.decoder.layers:
        layer.mlp.activation_func = nn.functional.relu
    expected = [forward(other, IMAGES, seed) for seed in range(3)]
    with on_graphs(policy) as first, on_graphs(other) as second:
        for seed in range(3):
            assert not torch.equal(forward(policy, IMAGES, seed)[0], expected[seed][0])
            assert_close(forward(other, IMAGES, seed), expected[seed])
        assert (counts(first), counts(second)) == ((0, 3), (0, 3))


def test_passes_in_evaluation_mode_share_with_training_once_they_were_compared():
    model = frozen_tower()
    with on_graphs(model) as graphs:
        for seed in range(3):
            model.eval()
            with torch.no_grad():
                before = forward(model, IMAGES, seed)
            model.train()
            assert_close(forward(model, IMAGES, seed), before)
        assert counts(graphs) == (2, 4)


def like_gelu_at_first(most):
    """Return an activation that equals GELU for values up to `most`."""
    return lambda x: nn.functional.gelu(x).clamp(max=most)


def bound_of(model, seed):
    """Return a bound that GELU's outputs over one microbatch keep, and those over others do not."""
    seen = []

    def look(x):
        seen.append(nn.functional.gelu(x).max().item())
        return nn.functional.gelu(x)

    activate(model, look)
    forward(model, IMAGES, seed)
    return max(seen)


def test_models_of_other_code_do_not_share_though_a_first_microbatch_is_equal():
    bounds = {seed: bound_of(frozen_tower(), seed) for seed in range(6)}
    first, last = min(bounds, key=bounds.get), max(bounds, key=bounds.get)
    assert bounds[first] < bounds[last]
    policy, other = frozen_tower(), frozen_tower()
    activate(policy, nn.functional.gelu)
    activate(other, like_gelu_at_first(bounds[first]))
    expected = forward(other, IMAGES, last)
    with on_graphs(policy), on_graphs(other):
        assert_close(forward(policy, IMAGES, first), forward(other, IMAGES, first), 0.0)
        assert not torch.equal(forward(policy, IMAGES, last)[0], expected[0])
        assert_close(forward(other, IMAGES, last), expected)


def test_models_of_other_settings_do_not_share():
    policy, other = frozen_tower(), frozen_tower()
    for layer in other.decoder.layers:
        layer.window = 7  # which no image of this test fills
    with on_graphs(policy) as first, on_graphs(other) as second:
        for seed in range(3):
            for model in (policy, other):
                forward(model, IMAGES, seed)
        assert (counts(first), counts(second)) == ((0, 3), (0, 3))


def test_states_of_one_model_that_were_equal_once_do_not_share():
    model = frozen_tower()
    bounds = {seed: bound_of(frozen_tower(), seed) for seed in range(6)}
    first, last = min(bounds, key=bounds.get), max(bounds, key=bounds.get)
    usual, other = nn.functional.gelu, like_gelu_at_first(bounds[first])
    with on_graphs(model) as graphs:
        for _ in range(3):  # until both states have graphs
            for function in (usual, other):
                activate(model, function)
                forward(model, IMAGES, first)
        activate(model, usual)
        forward(model, IMAGES, last)
        activate(model, other)
        with graphs.paused():
            expected = forward(model, IMAGES, last)
        assert_close(forward(model, IMAGES, last), expected)


def test_a_comparison_holds_for_the_weights_it_was_made_with():
    """An adapter that training alone runs adds nothing at first: its last weight is zero."""

    class OnlyInTraining(nn.Module):
        def __init__(self):
            super().__init__()
            self.added = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x):
            return nn.functional.gelu(x) + (self.added if self.training else 0.0)

    model, adapter = frozen_tower(), OnlyInTraining()
    activate(model, adapter)
    with on_graphs(model) as graphs, torch.no_grad():
        for _ in range(2):
            for training in (True, False):
                model.train(training)
                forward(model, IMAGES)
        adapter.added += 1.0
        model.train()
        forward(model, IMAGES)
        model.eval()
        with graphs.paused():
            expected = forward(model, IMAGES)
        assert_close(forward(model, IMAGES), expected)


class Counted(nn.Module):
    """A module as Transformer Engine's, which numbers those of a process and gives them a logger."""

    __module__ = "transformer_engine.pytorch.module.base"

    def __init__(self, name):
        super().__init__()
        self.name, self.logger = name, logging.getLogger(__name__)
        self.current_microbatch = None

    def forward(self, x):
        return nn.functional.gelu(x)


def test_a_policy_and_its_reference_share_though_their_modules_are_numbered():
    policy, reference = frozen_tower(), frozen_tower()
    for number, model in enumerate((policy, reference)):
        activate(model, Counted(f"Layer_{number}"))
    with on_graphs(policy) as first, on_graphs(reference) as second:
        for seed in range(3):
            forward(policy, IMAGES, seed)
            for layer in policy.decoder.layers:
                layer.mlp.activation_func.logger.debug("notes that somebody asked for this level")
                layer.mlp.activation_func.current_microbatch = seed
            forward(reference, IMAGES, seed)
        assert (counts(first), counts(second)) == ((0, 3), (2, 1))


def test_models_whose_modules_have_names_of_their_own_do_not_share():
    policy, other = frozen_tower(), frozen_tower()
    for name, model in (("fast", policy), ("slow", other)):
        activate(model, Counted(name))
    with on_graphs(policy) as first, on_graphs(other) as second:
        for seed in range(3):
            for model in (policy, other):
                forward(model, IMAGES, seed)
        assert (counts(first), counts(second)) == ((0, 3), (0, 3))
