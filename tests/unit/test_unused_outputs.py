"""Outputs that no loss reads: weights that only these need get no gradient, as in eager; zeros would decay them."""

import pytest
import torch

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..tape import TapeExecutor
from .towers import forward, graphs_on, loss_of, new_tower

ROWS = [(1, 8, 8), (2, 4, 8)]
READ = {"embeddings": [0], "the first feature": [1], "features": [1, 2], "all": [0, 1, 2]}


def gradients_of(tower, read):
    outputs = forward(tower, ROWS)
    tower.zero_grad()
    loss_of([outputs[i] for i in read]).backward()
    return {name: parameter.grad for name, parameter in tower.named_parameters()}


def assert_eagers(tower, graphs, read):
    with graphs.paused():
        expected = gradients_of(tower, read)
    found = gradients_of(tower, read)
    assert [name for name, g in found.items() if g is None] == [name for name, g in expected.items() if g is None]
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("executor", [ReferenceExecutor, TapeExecutor])
@pytest.mark.parametrize("streams", [1, 2])
def test_weights_that_only_unread_outputs_need_get_no_gradient(executor, streams):
    tower = new_tower()
    with graphs_on(tower, executor=executor(), streams=streams, buckets=(128,)) as graphs:
        for read in READ.values():
            assert_eagers(tower, graphs, read)
        assert graphs.statistics().replays == len(READ) and not graphs.statistics().fallbacks
