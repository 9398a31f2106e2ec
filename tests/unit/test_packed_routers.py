"""Routers of experts on graphs of packed documents, against eager."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from bridge_cg_plugin.options import OptionError

from .packs import (
    EXPERTS,
    ON_CPU,
    WARMUP,
    graphs_on,
    losses_and_gradients,
    new_model,
    pack,
    replayed,
)
from .towers import assert_close, poison

ROUTERS = {
    "no losses": {},
    "an auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "a loss of logits": {"moe_z_loss_coeff": 0.1},
    "a bias of experts": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "dropped tokens": {"moe_expert_capacity_factor": 1.0},
}


@pytest.mark.parametrize(
    "changes, modules",
    [
        (changes, ["attn", "moe_router"] if number % 2 else ["moe_router"])
        for number, changes in enumerate(ROUTERS.values())
    ],
    ids=ROUTERS,
)
def test_routers_of_experts(modules, changes):
    model = new_model(**{**EXPERTS, **changes})
    routers = [layer.mlp.router for layer in model.decoder.layers]
    counted = [router.local_tokens_per_expert for router in routers]
    expected, statistics = [], []
    for arguments in (pack((30, 180, 77)), pack((300,), seed=1)):
        expected.append(losses_and_gradients(model, arguments))
        statistics.append([None if c is None else c.clone() for c in counted])
        for count in counted:
            _ = count is None or count.zero_()
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=modules) as graphs:
        assert len(graphs._regions) == 2
        for count in counted:
            _ = count is None or count.zero_()
        for arguments, wanted, tokens in zip(
            (pack((30, 180, 77)), pack((300,), seed=1)), expected, statistics, strict=True
        ):
            poison(graphs, float("nan"))
            found = losses_and_gradients(model, arguments)
            assert_close([found[0], *found[1]], [wanted[0], *wanted[1]])
            for count, number in zip(counted, tokens, strict=True):
                assert count is None or torch.equal(count, number)
                _ = count is None or count.zero_()
        assert replayed(graphs) == 4 and not graphs.statistics().fallbacks
    assert not any({"forward", "gating"} & set(vars(router)) for router in routers)


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


FORCED = {
    "balance": {"moe_router_force_load_balancing": True},
    "a bias of nothing": {"moe_router_force_biased": 0.0},
}


@pytest.mark.parametrize("changes", FORCED.values(), ids=FORCED)
def test_forced_routing_draws_for_real_tokens_alone(changes):
    model, packs = new_model(**{**EXPERTS, **changes}), [pack((30, 180, 77)), pack((300,), seed=1)]
    with tracked() as wanted:
        model(**pack(WARMUP))
        before = dict(wanted)
        expected = [losses_and_gradients(model, arguments) for arguments in packs]
    modules = ["attn", "moe_router"]
    with ON_CPU(), tracked() as states, graphs_on(model, pack(WARMUP), cuda_graph_modules=modules) as graphs:
        assert all(torch.equal(states[name], before[name]) for name in before)
        found = [losses_and_gradients(model, arguments) for arguments in packs]
        assert replayed(graphs) == 4
    assert all(torch.equal(states[name], wanted[name]) for name in wanted)
    for one, other in zip(found, expected, strict=True):
        assert_close([one[0], *one[1]], [other[0], *other[1]])


def test_a_router_that_cannot_be_recorded_is_refused():
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    model = new_model(**EXPERTS, moe_input_jitter_eps=0.1)
    with pytest.raises(OptionError, match="moe_input_jitter_eps=0.1"):
        TransformerBlockFamily(model.decoder).parts(("attn", "moe_router"))
    model = new_model(**EXPERTS)
    model.decoder.layers[0].mlp.router = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="one is Linear"):
        TransformerBlockFamily(model.decoder).parts(("moe_router",))


def test_parts_that_no_layer_has_are_refused():
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    family = TransformerBlockFamily(new_model(**EXPERTS).decoder)
    with pytest.raises(OptionError, match="'mlp': it must be parts that this model's layers have"):
        family.parts(("mlp",))


def test_an_eager_microbatch_between_replays_routes_for_itself():
    """What a replay left for the calls behind it never answers another microbatch."""
    model = new_model(**EXPERTS)
    packs = [pack((100, 180)), pack((60, 40)), pack((290,))]
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=["attn", "moe_router"]) as graphs:
        for arguments, wanted in zip(packs, expected, strict=True):
            found = losses_and_gradients(model, arguments)
            assert_close([found[0], *found[1]], [wanted[0], *wanted[1]])
        assert graphs.statistics().fallbacks == {"too_few_tokens": 1}
        assert all(follower.outputs is None for follower in graphs._parts.followers)
