"""A mixture of experts over packed documents, its routers alone, beside attention or in whole layers, against eager."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import moe_logging, moe_utils
from torch.nn import functional

from bridge_cg_plugin.options import OptionError, facts
from bridge_cg_plugin.upstream.decoder import experts as packed_experts
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily
from bridge_cg_plugin.upstream.decoder.experts import NEEDED

from .packs import (
    EXPERTS,
    ON_CPU,
    VOCABULARY,
    WARMUP,
    assert_adds_to_main_grads,
    assert_same,
    eager,
    graphs_on,
    losses_and_gradients,
    new_model,
    new_qwen,
    pack,
    replayed,
    replaying,
)
from .vlm import CausalAttention

PACKS = (pack((30, 180, 77)), pack((300,), seed=1), pack((200, 120), seed=2), pack((321, 100), seed=3))


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch):
    """Megatron-core keeps losses of routers for the number of layers of the first model that a process trains."""
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)


def test_gradients_are_added_to_main_grad():
    model = new_model(**EXPERTS)
    with ON_CPU():
        put_on_graphs = partial(graphs_on, model, pack(WARMUP), cuda_graph_modules=[])
        assert_adds_to_main_grads(model, PACKS, put_on_graphs)


def test_frozen_experts():
    model = new_model(**EXPERTS)
    for layer in model.decoder.layers:
        layer.mlp.experts.requires_grad_(False)
    with ON_CPU(), replaying(model, PACKS[:1], pack(WARMUP), cuda_graph_modules=[]):
        pass


@pytest.mark.reference_executor
def test_padding_goes_to_no_expert(monkeypatch):
    seen = []
    find_rows = packed_experts.find_rows
    monkeypatch.setattr(packed_experts, "find_rows", lambda *args: seen.append(find_rows(*args)) or seen[-1])
    model = new_model(**EXPERTS)
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=[]) as graphs:
        del seen[:]
        model(**pack((270,)))
        assert graphs.statistics().replays == 1
    assert [int(rows.bounds[-1]) for rows in seen] == [2 * 270] * 2
    assert all(rows.tokens.shape[0] == 2 * 320 for rows in seen)


@pytest.mark.parametrize(
    "field, value, modules", [("moe_expert_capacity_factor", 0.5, []), ("moe_z_loss_coeff", 0.1, ["moe_router"])]
)
def test_options_that_change_after_capture_are_obeyed(field, value, modules):
    model = new_model(**EXPERTS)
    options = {"cuda_graph_modules": modules, "cuda_graph_packed_strict": False}
    with ON_CPU(), graphs_on(model, pack(WARMUP), **options) as graphs:
        setattr(model.config, field, value)
        for arguments in PACKS:
            assert_same(losses_and_gradients(model, arguments), eager(model, graphs, arguments))
        assert graphs.statistics().fallbacks


def test_a_token_is_multiplied_with_the_weights_of_its_experts():
    def weights(experts):
        return TransformerBlockFamily(new_model(**{**EXPERTS, "num_moe_experts": experts}).decoder).weights_per_token()

    model = new_model(**{**EXPERTS, "num_moe_experts": 2})  # a token goes to both
    assert weights(2) == sum(parameter.numel() for parameter in model.decoder.parameters())
    router = sum(layer.mlp.router.weight.numel() for layer in model.decoder.layers)
    assert weights(8) == weights(2) + 3 * router


@pytest.mark.parametrize("name", [*NEEDED, *facts.ROUTERS])
def test_settings_that_experts_inside_the_graph_do_not_have(name):
    model = new_model(**EXPERTS)
    setattr(model.decoder.layers[0].mlp.config, name, 2)
    with pytest.raises(OptionError, match=f"{name}=2: it must be .*Set cuda_graph_modules=attn,moe_router"):
        TransformerBlockFamily(model.decoder).parts(())


ADAPTED = type("LoRALinear", (torch.nn.Linear,), {})(2, 2)
FUSED = {"moe_router_fusion": True, "moe_aux_loss_coeff": 0.1}
WITHOUT_A_FUNCTION = {"bias_activation_fusion": True, "activation_func": functional.gelu}
# What is said of it -> parts, and a change of the last layer's experts.
REFUSED = {
    "moe_router_fusion=True": (
        (),
        lambda moe: (vars(moe.config).update(FUSED), setattr(moe.router, "routing_type", "aux_loss")),
    ),
    "linear layers of LoRALinear": ((), lambda moe: setattr(moe.experts.local_experts[1], "linear_fc1", ADAPTED)),
    "experts of LoRALinear": ((), lambda moe: setattr(moe, "experts", ADAPTED)),
    "weights that are not alike": ((), lambda moe: moe.experts.local_experts[0].linear_fc2.requires_grad_(False)),
    "activation_func=.*gelu": ((), lambda moe: vars(moe.config).update(WITHOUT_A_FUNCTION)),
    "moe_input_jitter_eps=0.1": (("attn", "moe_router"), lambda moe: setattr(moe.config, "moe_input_jitter_eps", 0.1)),
    "'mlp': it must be parts that this model's layers have": (("mlp",), lambda moe: None),
    "one is Linear": (("moe_router",), lambda moe: setattr(moe, "router", torch.nn.Linear(2, 2))),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_graph_computes_is_refused(said):
    parts, change = REFUSED[said]
    model = new_model(**EXPERTS)
    change(model.decoder.layers[-1].mlp)
    with pytest.raises(OptionError, match=said):
        TransformerBlockFamily(model.decoder).parts(parts)


ROUTER, BOTH, WHOLE = ["moe_router"], ["attn", "moe_router"], []
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LOGITS = {"moe_z_loss_coeff": 0.1}
CASES = {
    "swiglu": ({}, WHOLE),
    "gelu": ({"gated_linear_unit": False, "activation_func": functional.gelu}, WHOLE),
    "clamped": ({"activation_func_clamp_value": 0.5}, WHOLE),
    "one expert of a token": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, WHOLE),
    "all experts": ({"moe_router_topk": 4}, WHOLE),
    "a gate before shared experts": ({"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}, []),
    "dense layers, too": ({"moe_layer_freq": [0, 1]}, WHOLE),
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
TWO = PACKS[:2]


@pytest.mark.parametrize("changes, modules", CASES.values(), ids=CASES)
def test_losses_gradients_and_statistics_are_eagers(modules, changes):
    model = new_model(**{**EXPERTS, **changes})
    counts = bool({"moe_aux_loss_coeff", *BIAS, *LOGITS} & set(changes))
    with ON_CPU(), replaying(model, PACKS, pack(WARMUP), cuda_graph_modules=modules, counts=counts) as graphs:
        assert len(graphs._regions) == (2 if modules else 1)


def two_rows(tokens):
    """Return the arguments of Qwen3-VL's language model for two rows."""
    ids = torch.arange(2 * tokens).view(2, -1) % VOCABULARY
    positions = torch.arange(tokens).expand(3, 2, -1)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": None, "labels": ids.roll(-1, 1)}


@pytest.mark.parametrize("modules", [WHOLE, BOTH], ids=["all layers", "attention and routers"])
@pytest.mark.parametrize("kind", ["two losses", "a bias of experts"])
def test_rows_are_filled_up_to_a_length_and_padding_counts_for_nothing(kind, modules):
    model = new_qwen(**{**EXPERTS, **CASES[kind][0]})
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = CausalAttention(None)
    batches = list(map(two_rows, (96, 128, 70)))
    options = {"cuda_graph_max_packed_seqs": None, "seq_length": 256, "cuda_graph_modules": modules}
    with ON_CPU(), replaying(model, batches, counts=True, **options) as graphs:
        assert graphs.statistics().padding_share > 0


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
        expected = [losses_and_gradients(model, arguments) for arguments in TWO]
    with ON_CPU(), tracked() as states, graphs_on(model, pack(WARMUP), cuda_graph_modules=BOTH) as graphs:
        assert all(torch.equal(states[name], before[name]) for name in before)
        found = [losses_and_gradients(model, arguments) for arguments in TWO]
        assert replayed(graphs) == 4
    assert all(torch.equal(states[name], wanted[name]) for name in wanted)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


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
