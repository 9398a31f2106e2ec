"""What megatron-core asserts of its own offloading, the plugin refuses first, and says what to change."""

from itertools import product

import pytest

from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.upstream.hooks.configuration.graph_fields import apply_options

EXPERTS = {"num_moe_experts": 8, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
# Experts inside a graph of megatron-core's take the same number of tokens each.
EQUAL = {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
FUSED = {**EXPERTS, "use_transformer_engine_op_fuser": True}
STASHED = {
    **FUSED,
    "moe_paged_stash": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
}
MIXED = {**EXPERTS, "moe_layer_freq": [0, 1]}
MODELS = {
    **{"dense": {}, "experts": EXPERTS, "mixed": MIXED, "equal": EQUAL},
    **{"fused": FUSED, "stashed": STASHED},
}
GRAPHS = {
    "none": {"cuda_graph_impl": "none"},
    "attn": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
    "mlp": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]},
    "router": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]},
    "moe": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]},
    "local moe": {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe"]},
    "local attn": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    "step": {"cuda_graph_impl": "full_iteration"},
}
OFFLOADED = (
    *(["core_attn"], ["attn_proj"], ["qkv_linear", "core_attn", "attn_proj"], ["attn_norm"], ["mlp_norm"]),
    *(["expert_fc1"], ["moe_act"], ["fused_group_mlp"], ["fused_group_mlp", "moe_act"], ["core_attn", "expert_fc1"]),
)
SOME_OFFLOADED = (["qkv_linear", "core_attn", "attn_proj"], ["mlp_norm"], ["core_attn", "expert_fc1"])
SETTINGS = (
    *({}, {"cuda_graph_warmup_steps": 0}, {"fine_grained_offloading_max_inflight_offloads": 1}),
    *({"activation_offload_fraction": 0.5}, {"delta_offload_bytes_across_pp_ranks": 4096}),
    {"delay_offload_until_cuda_graph": True},
)
RELEASE_FIELDS = "delay_offload_until_cuda_graph", "cuda_graph_modules"


def provider(**fields):
    """Return the provider of a language model, with Transformer Engine's random states."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    common = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 128}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False}
    return GPTModelProvider(**common, **quiet, use_te_rng_tracker=True, **fields)


@pytest.fixture
def latest(active):
    """Skip releases of megatron-core that lack a field."""
    missing = [name for name in RELEASE_FIELDS if not hasattr(provider(), name)]
    if missing:
        pytest.skip(f"megatron-core has no {', '.join(missing)}")


def offloading(modules, **fields):
    return provider(fine_grained_activation_offloading=True, offload_modules=list(modules), **fields)


def refusal_of(work, *kinds):
    """Return the message of the refusal; None where nothing is refused."""
    try:
        work()
    except kinds as error:
        return str(error)
    return None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graphs", GRAPHS)
def test_the_plugin_refuses_what_megatron_core_asserts(latest, model, graphs):
    if refusal_of(provider(**MODELS[model], **GRAPHS[graphs]).finalize, AssertionError, ValueError):
        pytest.skip("refused without offloading, too")
    missed = []
    for modules, setting in (*product(OFFLOADED, SETTINGS[:1]), *product(SOME_OFFLOADED, SETTINGS[1:])):
        fields = {**MODELS[model], **GRAPHS[graphs], **setting}
        upstream = refusal_of(offloading(modules, **fields).finalize, AssertionError, ValueError)
        mine = refusal_of(lambda m=modules, f=fields: graph_options(offloading(m, **f)), OptionError)
        if upstream and not mine:
            missed.append((modules, setting, upstream))
    assert not missed


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graphs", GRAPHS)
def test_megatron_core_takes_what_the_shared_option_sets(latest, model, graphs):
    if refusal_of(provider(**MODELS[model], **GRAPHS[graphs]).finalize, AssertionError, ValueError):
        pytest.skip("refused without offloading, too")
    for parts in (["attention"], ["mlp"], ["layernorm"], ["attention", "mlp", "layernorm"]):
        made = provider(**MODELS[model], **GRAPHS[graphs])
        try:
            apply_options(graph_options(made, {"activation_offload": parts}), made)
        except OptionError:
            continue
        made.finalize()
        assert made.fine_grained_activation_offloading
        assert not {"expert_fc1", "moe_act"} & set(made.offload_modules) or not made.use_transformer_engine_op_fuser


def test_norms_before_experts_leave_beside_captured_mlps_of_other_layers(latest):
    made = offloading(["mlp_norm"], **MIXED, **GRAPHS["mlp"])
    apply_options(graph_options(made), made)
    made.finalize()
    assert made.offload_modules == ["mlp_norm"]


def test_nemotrons_encoder_has_the_settings_of_its_language_model(latest):
    from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider

    told = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    made = NemotronOmniModelProvider(**told, num_attention_heads=4, hidden_size=64, hybrid_layer_pattern="M*")
    assert made._build_vision_config(made).fine_grained_activation_offloading
    with pytest.raises(OptionError, match="would count layers of the encoder"):
        graph_options(made)
