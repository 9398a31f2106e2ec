"""A mixture of experts as one region over packed documents, experts included, through the reference executor."""

import pytest
import torch
from torch.nn import functional

from bridge_cg_plugin.options import OptionError, facts
from bridge_cg_plugin.upstream.decoder import experts as packed_experts
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily
from bridge_cg_plugin.upstream.decoder.experts import NEEDED

from .packs import (
    EXPERTS,
    ON_CPU,
    assert_adds_to_main_grads,
    assert_same,
    graphs_on,
    losses_and_gradients,
    new_model,
    pack,
)
from .towers import poison

WARMUP = (100, 150, 50)
MODELS = {
    "swiglu": {},
    "gelu": {"gated_linear_unit": False, "activation_func": functional.gelu},
    "clamped": {"activation_func_clamp_value": 0.5},
    "one expert of a token": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all experts": {"moe_router_topk": 4},
    "a gate before shared experts": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "dense layers, too": {"moe_layer_freq": [0, 1]},
}
PACKS = (pack((30, 180, 77)), pack((300,), seed=1), pack((200, 120), seed=2), pack((321, 100), seed=3))


def on_graphs(model, *warmup, **options):
    return graphs_on(model, *(warmup or (pack(WARMUP),)), cuda_graph_modules=[], **options)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_are_eagers(changes):
    model = new_model(**{**EXPERTS, **changes})
    expected = [losses_and_gradients(model, arguments) for arguments in PACKS]
    assert_replays_are_eagers(model, PACKS, expected)
    assert not any("forward" in vars(layer.mlp) for layer in model.decoder.layers)


def assert_replays_are_eagers(model, packs, expected):
    """Compare losses and gradients of packs on graphs with those of eager."""
    with ON_CPU(), on_graphs(model) as graphs:
        for arguments, wanted in zip(packs, expected, strict=True):
            poison(graphs, float("nan"))
            found = losses_and_gradients(model, arguments)
            assert_same(found, wanted)
        assert len(graphs._regions) == 1
        assert graphs.statistics().replays == len(packs) and not graphs.statistics().fallbacks


def test_gradients_are_added_to_main_grad():
    model = new_model(**EXPERTS)
    with ON_CPU():
        assert_adds_to_main_grads(model, PACKS[:2], lambda: on_graphs(model))


def test_frozen_experts():
    model = new_model(**EXPERTS)
    for layer in model.decoder.layers:
        layer.mlp.experts.requires_grad_(False)
    expected = losses_and_gradients(model, PACKS[0])
    with ON_CPU(), on_graphs(model) as graphs:
        found = losses_and_gradients(model, PACKS[0])
        assert graphs.statistics().replays == 1
    assert_same(found, expected)


@pytest.mark.reference_executor
def test_padding_goes_to_no_expert(monkeypatch):
    seen = []
    find_rows = packed_experts.find_rows
    monkeypatch.setattr(packed_experts, "find_rows", lambda *args: seen.append(find_rows(*args)) or seen[-1])
    model = new_model(**EXPERTS)
    with ON_CPU(), on_graphs(model) as graphs:
        del seen[:]
        model(**pack((270,)))
        assert graphs.statistics().replays == 1
    assert [int(rows.bounds[-1]) for rows in seen] == [2 * 270] * 2
    assert all(rows.tokens.shape[0] == 2 * 320 for rows in seen)


def assert_packs_are_eagers(model, graphs):
    for arguments in PACKS:
        found = losses_and_gradients(model, arguments)
        with graphs.paused():
            expected = losses_and_gradients(model, arguments)
        assert_same(found, expected)


CHANGED = {"moe_expert_capacity_factor": 0.5, "moe_z_loss_coeff": 0.1}


@pytest.mark.parametrize(
    "field, value, modules",
    [(*item, modules) for item, modules in zip(CHANGED.items(), ([], ["moe_router"]), strict=True)],
    ids=CHANGED,
)
def test_options_that_change_after_capture_are_obeyed(field, value, modules):
    model = new_model(**EXPERTS)
    options = {"cuda_graph_modules": modules, "cuda_graph_packed_strict": False}
    with ON_CPU(), graphs_on(model, pack(WARMUP), **options) as graphs:
        setattr(model.config, field, value)
        assert_packs_are_eagers(model, graphs)
        assert graphs.statistics().fallbacks


@pytest.mark.parametrize("modules", [[], ["attn", "moe_router"]], ids=["whole", "both"])
def test_a_router_that_is_replaced_after_capture_routes(modules):
    model, other = new_model(**EXPERTS), new_model(seed=1, **EXPERTS)
    options = {"cuda_graph_modules": modules, "cuda_graph_packed_strict": False}
    with ON_CPU(), graphs_on(model, pack(WARMUP), **options) as graphs:
        model.decoder.layers[0].mlp.router = other.decoder.layers[0].mlp.router
        assert_packs_are_eagers(model, graphs)


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


def test_losses_of_fused_routers_are_refused():
    model = new_model(**EXPERTS, **{"moe_aux_loss_coeff": 0.1} | {"moe_router_fusion": True})
    model.decoder.layers[0].mlp.router.routing_type = "aux_loss"
    with pytest.raises(OptionError, match="moe_router_fusion=True"):
        TransformerBlockFamily(model.decoder).parts(())


def test_other_experts_are_refused():
    model = new_model(**EXPERTS)
    first = model.decoder.layers[0].mlp.experts
    adapted = type("LoRALinear", (torch.nn.Linear,), {})(2, 2)
    first.local_experts[1].linear_fc1 = adapted
    with pytest.raises(OptionError, match="linear layers of LoRALinear"):
        TransformerBlockFamily(model.decoder).parts(())
    model.decoder.layers[0].mlp.experts = adapted
    with pytest.raises(OptionError, match="experts of LoRALinear"):
        TransformerBlockFamily(model.decoder).parts(())
    model = new_model(**EXPERTS)
    model.decoder.layers[1].mlp.experts.local_experts[0].linear_fc2.weight.requires_grad_(False)
    with pytest.raises(OptionError, match="weights that are not alike"):
        TransformerBlockFamily(model.decoder).parts(())


def test_settings_without_a_function_between_the_linear_layers_are_refused():
    model = new_model(**EXPERTS)
    config = model.decoder.layers[0].mlp.config
    config.bias_activation_fusion, config.activation_func = True, functional.gelu
    with pytest.raises(OptionError, match="model.activation_func=.*gelu"):
        TransformerBlockFamily(model.decoder).parts(())
