"""megatron-core's recompute of activations inside graphs: as without it, and the layers run again in the backward."""

from itertools import count

import pytest
import torch
from megatron.core import tensor_parallel

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.kernels import recompute

from ..tape import TapeExecutor
from . import packs
from .towers import assert_close, forward, graphs_on, loss_of, new_tower, results

FULL = {
    "each layer": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "the first layer": {"recompute_method": "block", "recompute_num_layers": 1},
}
# What a layer decides by `recompute_modules` when it is made.
SELECTIVE = {"core_attn": "self_attention.checkpoint_core_attention", "mlp": "recompute_mlp"}


@pytest.fixture
def again(monkeypatch):
    """Count how often recorded work runs what it recomputes once more."""
    found, checkpoint = count(), recompute.checkpoint

    def counting(function, *args, **settings):
        runs = count()

        def counted(*given):
            if next(runs):
                next(found)
            return function(*given)

        return checkpoint(counted, *args, **settings)

    monkeypatch.setattr(recompute, "checkpoint", counting)
    return found


def let_layers_recompute(layers, module):
    for layer in layers:
        owner, _, name = SELECTIVE[module].rpartition(".")
        setattr(layer.get_submodule(owner), name, True)


def recomputing_tower(**fields):
    tower = new_tower()
    configs = {id(module.config): module.config for module in tower.modules() if hasattr(module, "config")}
    for config in configs.values():
        vars(config).update(recompute_granularity="full", distribute_saved_activations=False, **fields)
    return tower


def assert_the_same(tower):
    plain = new_tower()
    for seed in range(2):
        expected, found = (results(model, [[1, 4, 4], [1, 4, 6]], seed) for model in (plain, tower))
        assert all(map(torch.equal, found[0], expected[0]))
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("fields", FULL.values(), ids=FULL)
def test_layers_of_an_encoder_are_recomputed(fields, again):
    tower = recomputing_tower(**fields)
    with graphs_on(tower, buckets=(64,), executor=TapeExecutor()) as graphs:
        assert next(again) > 0
        assert_the_same(tower)
        assert graphs.statistics().replays == 2


# A type of mask is a tensor on the host, which this executor reads as any other.
@pytest.mark.parametrize(("module", "executor"), [("mlp", TapeExecutor), ("core_attn", ReferenceExecutor)])
def test_parts_of_an_encoders_layers_are_recomputed(module, executor, again):
    tower = new_tower()
    let_layers_recompute(tower.decoder.layers, module)
    with graphs_on(tower, buckets=(64,), executor=executor()) as graphs:
        assert_the_same(tower)
        assert next(again) > 0 and graphs.statistics().replays == 2


@pytest.mark.parametrize(("module", "executor"), [("mlp", TapeExecutor), ("core_attn", ReferenceExecutor)])
def test_parts_of_layers_of_packs_are_recomputed(module, executor, again):
    model, plain = packs.new_model(), packs.new_model()
    with packs.graphs_on(model, packs.pack(packs.WARMUP), capture=False, executor=executor()) as graphs:
        let_layers_recompute(model.decoder.layers, module)
        graphs.capture()
        for seed in range(2):
            batch = packs.pack((120, 150), seed=seed)
            expected, found = (each(**batch) for each in (plain, model))
            assert_close([found], [expected])
            grads = (
                torch.autograd.grad(loss_of([out]), list(m.parameters()))
                for m, out in ((model, found), (plain, expected))
            )
            assert_close(*grads)
        assert next(again) > 0
        assert graphs.statistics().replays == 2 and not graphs.statistics().fallbacks


def test_a_frozen_encoder_keeps_nothing_to_recompute():
    tower, plain = recomputing_tower(**FULL["each layer"]).requires_grad_(False), new_tower()
    with graphs_on(tower, buckets=(64,), executor=TapeExecutor()) as graphs:
        assert all(map(torch.equal, forward(tower, [[1, 4, 4]]), forward(plain, [[1, 4, 4]])))
        assert graphs.statistics().replays == 1


def test_layers_that_draw_are_refused():
    tower = recomputing_tower(**FULL["each layer"])
    tower.decoder.config.hidden_dropout = 0.1
    draws = pytest.raises(CaptureError, match="set hidden_dropout to 0")
    with graphs_on(tower, capture=False, executor=TapeExecutor()) as graphs, draws:
        graphs.capture()


def test_somebody_elses_function_stays(monkeypatch):
    calls = []
    monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, _, *args: (calls.append(1), function(*args))[1])
    with graphs_on(recomputing_tower(**FULL["each layer"]), buckets=(64,), executor=TapeExecutor()):
        assert calls
