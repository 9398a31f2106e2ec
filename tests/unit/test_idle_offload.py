"""Values of megatron-core's offloading that have no effect are named with the reason."""

import pytest

from bridge_cg_plugin.options import normalize

CORE = "fine_grained_activation_offloading=true offload_modules="
TE = "cuda_graph_impl=transformer_engine cuda_graph_modules="
DELAY, DELTA = "delay_offload_until_cuda_graph=true", "delta_offload_bytes_across_pp_ranks=4096"
OFF = "megatron-core offloads nothing (fine_grained_activation_offloading=false)"
WAITING = "only expert_fc1 and moe_act beside captured attn or moe_router wait"
IN_LINEAR = "its norms are part of the linear layers behind them"
# What a person wrote -> the line.
IDLE = {
    "activation_offload_fraction=0.5 offload_modules=core_attn": (
        f"offload_modules=core_attn, activation_offload_fraction=0.5: no effect, {OFF}"
    ),
    f"{TE}attn cuda_graph_max_packed_seqs=8 activation_offload=attention {DELTA}": f"{DELTA}: no effect, {OFF}",
    f"{CORE}expert_fc1 delay_offload_until_cuda_graph=true": (
        f"delay_offload_until_cuda_graph=True: no effect, {WAITING}"
    ),
    f"{CORE}core_attn {TE}attn {DELAY}": f"delay_offload_until_cuda_graph=True: no effect, {WAITING}",
    f"{CORE}moe_act {TE}mlp {DELAY}": f"delay_offload_until_cuda_graph=True: no effect, {WAITING}",
    f"{CORE}core_attn {DELTA} pipeline_model_parallel_size=1": f"{DELTA}: no effect, there is one pipeline stage",
    f"{CORE}core_attn,moe_act activation_offload_fraction=0": (
        "offload_modules=core_attn,moe_act: no effect, activation_offload_fraction=0 offloads nothing"
    ),
    "fine_grained_activation_offloading=true activation_offload_fraction=0": (
        "fine_grained_activation_offloading=True: no effect, activation_offload_fraction=0 offloads nothing"
    ),
    f"{CORE}core_attn,attn_norm multi_latent_attention=false": f"attn_norm in offload_modules: no effect, {IN_LINEAR}",
    f"{CORE}core_attn,attn_norm multi_latent_attention=true mla_down_proj_fusion=true": (
        f"attn_norm in offload_modules: no effect, {IN_LINEAR}"
    ),
    f"{CORE}core_attn,mlp_norm num_moe_experts=null": f"mlp_norm in offload_modules: no effect, {IN_LINEAR}",
}
USED = [
    "",
    "fine_grained_activation_offloading=false",
    "activation_offload_fraction=1.0",
    f"{CORE}expert_fc1 {TE}moe_router {DELAY}",
    f"{CORE}core_attn,moe_act {TE}attn {DELAY}",
    f"{CORE}core_attn {DELTA}",
    f"{CORE}core_attn {DELTA} pipeline_model_parallel_size=2",
    f"{CORE}core_attn,moe_act activation_offload_fraction=0.1",
    f"{CORE}attn_norm,mlp_norm num_moe_experts=8",
    f"{CORE}attn_norm multi_latent_attention=true",
    f"{CORE}attn_norm multi_latent_attention=false experimental_attention_variant=gated_delta_net",
]


@pytest.mark.parametrize("words", IDLE)
def test_a_value_without_effect_is_said_with_the_reason(words):
    assert [line for line in normalize(words)[0].warnings if "no effect" in line] == [IDLE[words]]


@pytest.mark.parametrize("words", USED)
def test_what_has_an_effect_is_not(words):
    assert not normalize(words)[0].warnings


def test_what_a_recipe_holds_for_offloading_that_is_off_is_its_own_business():
    from types import SimpleNamespace

    recipe = SimpleNamespace(
        cuda_graph_impl="none",
        fine_grained_activation_offloading=False,
        offload_modules=["core_attn"],
        activation_offload_fraction=0.5,
    )
    assert not normalize(recipe)[0].warnings
    assert len(normalize(recipe, "activation_offload_fraction=0.25")[0].warnings) == 1
