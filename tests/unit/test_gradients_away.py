"""Gradients whose memory leaves the device while log-probabilities are computed, as loops do that offload a model."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import Bucket

from ..main_grads import give_main_grads, hook_main_grads
from ..other_memory import are_intact, fill_elsewhere
from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import CountingTape

WIDTH = 4


class Gradients:
    """A buffer of `main_grad`s, as data parallelism has it, behind those of so many other elements."""

    def __init__(self, model, before=0):
        self.flat, self._others = torch.zeros(before + sum(p.numel() for p in model.parameters())), []
        self._nbytes, self._addresses = self.flat.nbytes, {self.flat.data_ptr()}
        give_main_grads(model.parameters(), self.flat[before:])
        self._nodes = hook_main_grads(model.parameters())

    def leave(self):
        self.flat.untyped_storage().resize_(0)

    def back(self):
        """Take memory again, other than ever before."""
        self._others += fill_elsewhere(self.flat.untyped_storage(), self._nbytes, self._addresses)
        self._addresses.add(self.flat.data_ptr())
        self.flat.zero_()

    def others_are_intact(self):
        return are_intact(self._others)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


@pytest.fixture(params=[0, WIDTH])
def gradients(model, request):
    return Gradients(model, request.param)


@pytest.fixture
def executor():
    return CountingTape()


def captured(model, executor):
    region = new_region(RowsProgram(model, (WIDTH,)), executor, [Bucket(8)])
    region.capture()
    return region


def log_probabilities(region, model):
    x = torch.randn(3, WIDTH)
    model.eval()
    with torch.no_grad():
        (found,) = region.run(x)
        torch.testing.assert_close(found, nn.functional.linear(x, model.weight, model.bias))


def train(region, model):
    """Run a microbatch with its backward; returns whether it was on graphs."""
    x = torch.randn(3, WIDTH)
    model.train()
    found = region.run(x)
    if found is None:
        return False
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    found[0].sum().backward()
    torch.testing.assert_close(model.bias.main_grad, torch.full((WIDTH,), 3.0))
    torch.testing.assert_close(model.weight.main_grad, x.sum(0).expand(WIDTH, WIDTH))
    return True


def look(region):
    """Look for what to record before a pass, as is done before every step."""
    assert not region.wishes


@pytest.mark.parametrize("looks", [False, True])
def test_graphs_without_a_backward_stay_when_gradients_alone_move(model, gradients, executor, looks):
    region, counts = captured(model, executor), []
    for _ in range(4):
        gradients.leave()
        if looks:
            look(region)
        log_probabilities(region, model)
        gradients.back()
        assert train(region, model) and gradients.others_are_intact()
        log_probabilities(region, model)
        counts.append(executor.recorded)
    forward_only, training = 1, 1
    assert counts == [forward_only + training * (2 + number) for number in range(4)]


def test_a_capture_while_gradients_are_away_records_no_backward(model, gradients, executor):
    gradients.leave()
    region = captured(model, executor)
    log_probabilities(region, model)
    assert executor.recorded == 1
    gradients.back()
    assert [train(region, model) for _ in range(3)][-1]
    log_probabilities(region, model)
    assert executor.recorded == 2


def test_passes_with_gradients_on_run_eager_while_gradients_are_away(model, gradients, executor):
    region = captured(model, executor)
    recorded = executor.recorded
    gradients.leave()
    assert [train(region, model) for _ in range(3)] == [False] * 3
    assert region.statistics.fallbacks == {Fallback.GRADIENTS_LEFT: 3} and executor.recorded == recorded
    gradients.back()
    assert train(region, model) and gradients.others_are_intact()
