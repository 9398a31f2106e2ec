"""Random states that a graph cannot use: a loop may have made them; they matter only to what draws from them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch import nn

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.upstream.kernels.recompute import random_states, usable_random_states


class Tracker:
    """A tracker that counts forks."""

    def __init__(self):
        self.forks = 0

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        self.forks += 1
        yield


@pytest.fixture
def tracker(active, monkeypatch):
    found = Tracker()
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: found)
    states(monkeypatch, torch.zeros(3))
    return found


def states(monkeypatch, state):
    monkeypatch.setattr(random, "get_all_rng_states", lambda: {"model-parallel-rng": state})


def layer(training=True, **config):
    module = nn.Linear(2, 2).train(training)
    module.config = SimpleNamespace(**{"attention_dropout": 0.0, "hidden_dropout": 0.0, **config})
    return module


def test_a_fork_without_a_draw_is_left_out_of_recorded_work_only(tracker):
    with usable_random_states([layer()]), tracker.fork(), tracker.fork("other"):
        assert tracker.forks == 0
    with tracker.fork():
        assert tracker.forks == 1
    assert random_states() == ()


def test_states_that_a_graph_can_use_are_forked(tracker, monkeypatch):
    states(monkeypatch, torch.Generator())
    with usable_random_states([layer(attention_dropout=0.1)]), tracker.fork():
        assert tracker.forks == 1


@pytest.mark.parametrize("option", ["attention_dropout", "hidden_dropout"])
def test_a_draw_is_refused_with_what_to_do(tracker, option):
    with (
        pytest.raises(CaptureError, match=rf"{option} draws.*te_rng_tracker=True"),
        usable_random_states([layer(**{option: 0.1})]),
        tracker.fork(),
    ):
        pass
    with tracker.fork():
        assert tracker.forks == 1
