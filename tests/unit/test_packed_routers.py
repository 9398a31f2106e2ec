"""Routers of experts on graphs of packed documents, alone, beside attention or in whole layers, against eager."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily
from bridge_cg_plugin.upstream.decoder.experts import statistics_of
from tests.routers import take_statistics

from .packs import EXPERTS, ON_CPU, WARMUP, assert_same, graphs_on, losses_and_gradients, new_model, pack, replayed
from .towers import poison

ROUTER, BOTH, WHOLE = ["moe_router"], ["attn", "moe_router"], []
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LOGITS = {"moe_z_loss_coeff": 0.1}
CASES = {
    "no losses": ({}, ROUTER),
    "a loss": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}, BOTH),
    "two losses": (
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        WHOLE,
    ),
    "a loss of logits, the router": (LOGITS, ROUTER),
    "a loss of logits": (LOGITS, WHOLE),
    "a bias of experts, both": (BIAS, BOTH),
    "a bias of experts": (BIAS, WHOLE),
    "dropped tokens": ({"moe_expert_capacity_factor": 1.0}, ROUTER),
}
PACKS = pack((30, 180, 77)), pack((300,), seed=1)


@pytest.mark.parametrize("changes, modules", CASES.values(), ids=CASES)
def test_losses_and_statistics_are_eagers(modules, changes):
    """A capture counts and logs nothing."""
    model = new_model(**{**EXPERTS, **changes})
    routers = [layer.mlp.router for layer in model.decoder.layers]
    take_statistics(routers)
    expected = [(losses_and_gradients(model, arguments), take_statistics(routers)) for arguments in PACKS]
    counts = bool({"moe_aux_loss_coeff", *BIAS, *LOGITS} & set(changes))
    assert all(any(value.any() for value in statistics) == counts for _, statistics in expected)
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=modules, capture=False) as graphs:
        before = [tensor.clone() for tensor in statistics_of(routers)]
        assert graphs.capture() and len(graphs._regions) == (2 if modules else 1)
        assert all(map(torch.equal, statistics_of(routers), before))
        take_statistics(routers)
        for arguments, (wanted, statistics) in zip(PACKS, expected, strict=True):
            poison(graphs, float("nan"))
            assert_same(losses_and_gradients(model, arguments), wanted)
            torch.testing.assert_close(take_statistics(routers), statistics)
        assert replayed(graphs) == 2 * len(graphs._regions) and not graphs.statistics().fallbacks
    assert not any({"forward", "gating", "_apply_expert_bias"} & set(vars(router)) for router in routers)


@contextmanager
def tracked():
    """Let routers draw as on a GPU, from states of a tracker; yields these."""
    states = dict.fromkeys(("expert-parallel-rng", "data-parallel-rng"), torch.Generator().manual_seed(5).get_state())

    @contextmanager
    def fork(name):
        own = torch.get_rng_state()
        torch.set_rng_state(states[name])
        yield
        states[name] = torch.get_rng_state()
        torch.set_rng_state(own)

    with mock.patch.object(moe_utils, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork)):
        yield states


@pytest.mark.parametrize("changes", [{"moe_router_force_load_balancing": True}, {"moe_router_force_biased": 0.0}])
def test_forced_routing_draws_for_real_tokens_alone(changes):
    model = new_model(**{**EXPERTS, **changes})
    with tracked() as wanted:
        model(**pack(WARMUP))
        before = dict(wanted)
        expected = [losses_and_gradients(model, arguments) for arguments in PACKS]
    with ON_CPU(), tracked() as states, graphs_on(model, pack(WARMUP), cuda_graph_modules=BOTH) as graphs:
        assert all(torch.equal(states[name], before[name]) for name in before)
        found = [losses_and_gradients(model, arguments) for arguments in PACKS]
        assert replayed(graphs) == 4
    assert all(torch.equal(states[name], wanted[name]) for name in wanted)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_router_that_cannot_be_recorded_is_refused():
    model = new_model(**EXPERTS, moe_input_jitter_eps=0.1)
    with pytest.raises(OptionError, match="moe_input_jitter_eps=0.1"):
        TransformerBlockFamily(model.decoder).parts(("attn", "moe_router"))
    model = new_model(**EXPERTS)
    with pytest.raises(OptionError, match="'mlp': it must be parts that this model's layers have"):
        TransformerBlockFamily(model.decoder).parts(("mlp",))
    model.decoder.layers[0].mlp.router = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="one is Linear"):
        TransformerBlockFamily(model.decoder).parts(("moe_router",))


def test_an_eager_microbatch_between_replays_routes_for_itself():
    """What a replay left for the calls behind it never answers another microbatch."""
    model = new_model(**EXPERTS)
    packs = [pack((100, 180)), pack((60, 40)), pack((290,))]
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=BOTH) as graphs:
        for arguments, wanted in zip(packs, expected, strict=True):
            assert_same(losses_and_gradients(model, arguments), wanted)
        assert graphs.statistics().fallbacks == {"too_few_tokens": 1}
        assert all(follower.outputs is None for follower in graphs._parts.followers)
