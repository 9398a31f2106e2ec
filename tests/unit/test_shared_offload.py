"""One option of offloading for the encoder's region, for packs, and for layers that megatron-core runs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.options import OFFLOAD_MODULES, GraphOptions, OptionError, graph_options, normalize
from bridge_cg_plugin.options.shared_offload import CORE_MODULES

TE = "cuda_graph_impl=transformer_engine"
VISION = "vision_cuda_graph_impl=transformer_engine"
PACKED = f"{TE} cuda_graph_max_packed_seqs=8"
MOE = "num_moe_experts=8"


def test_every_region_that_is_on_takes_it_over():
    found = graph_options(f"{VISION} {PACKED} activation_offload=attention,mlp")
    assert found.vision.offload == found.packed.offload == ("attention", "mlp")
    assert not found.offload.enabled and not found.offload.modules  # the plugin runs the layers


def test_layers_that_the_plugin_does_not_run_are_megatron_cores():
    found = graph_options(f"activation_offload=all min_offloaded_tensor_size=2048 {MOE}").offload
    assert found.enabled and found.min_tensor_size == 2048
    assert found.modules == ("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act", "mlp_norm")
    latent = graph_options(f"activation_offload=layernorm multi_latent_attention=true {MOE}").offload
    assert latent.modules == ("attn_norm", "mlp_norm")
    words = f"activation_offload=layernorm multi_latent_attention=true mla_down_proj_fusion=true {MOE}"
    assert graph_options(words).offload.modules == ("mlp_norm",)
    words = words.replace("layernorm", "attention")
    assert graph_options(words).offload.modules == ("core_attn", "attn_proj")


def test_experts_whose_mlp_is_one_operation_are_offloaded_whole():
    words = f"use_transformer_engine_op_fuser=true {MOE}"
    found = graph_options(f"activation_offload=attention,mlp {words}").offload
    assert found.modules == ("qkv_linear", "core_attn", "attn_proj", "fused_group_mlp")
    with pytest.raises(OptionError, match="does not wait for copies in graphs of whole layers"):
        graph_options(f"activation_offload=mlp {words} {TE}")


def test_a_language_model_whose_encoder_has_its_settings_is_not_megatron_cores_to_offload():
    base = type("NemotronVLModelProvider", (SimpleNamespace,), {})
    told = {"cuda_graph_impl": "none", "activation_offload": "attention"}
    found = graph_options(base(vision_cuda_graph_impl="transformer_engine", **told))
    assert found.vision.offload == ("attention",) and not found.offload.enabled
    with pytest.raises(OptionError, match="would count layers of the encoder"):
        graph_options(base(vision_cuda_graph_impl="none", **told))


def test_norms_that_read_a_graphs_output_stay():
    words = f"activation_offload=layernorm multi_latent_attention=true {MOE} {TE} cuda_graph_modules="
    assert graph_options(f"{words}mlp").offload.modules == ("mlp_norm",)
    assert graph_options(f"{words}moe_router").offload.modules == ("attn_norm",)


@pytest.mark.parametrize("words", ["", "activation_offload=none", "activation_offload=null"])
def test_nothing_said_changes_nothing(words):
    assert graph_options(f"{VISION} {words}").vision.offload is None
    assert not graph_options(f"{VISION} {words}").offload.enabled


# What a person wrote -> megatron-core's modules that leave, and the part that a warning names.
LEAVING = {
    f"{TE} cuda_graph_modules=attn {MOE}": ("qkv_linear core_attn attn_proj expert_fc1 moe_act", "layernorm"),
    f"{TE} cuda_graph_modules=moe_router {MOE}": ("qkv_linear core_attn attn_proj expert_fc1 moe_act", "layernorm"),
    "num_moe_experts=null": ("qkv_linear core_attn attn_proj", "mlp"),
    f"cuda_graph_impl=local cuda_graph_modules=attn {MOE}": ("expert_fc1 moe_act", "attention"),
    f"{TE} {VISION} num_moe_experts=null": ("", "attention"),
}


@pytest.mark.parametrize("words", LEAVING)
def test_what_stays_is_said_with_the_reason(words):
    modules, part = LEAVING[words]
    found = graph_options(f"{words} activation_offload=attention,mlp,layernorm")
    assert found.offload.modules == tuple(modules.split()) and found.offload.enabled == bool(modules)
    (said,) = [w for w in found.warnings if f" {part} of the language model stays on the device" in w]
    assert said.startswith("activation_offload: ")


def test_a_bound_on_copies_in_flight_comes_with_graphs_of_whole_steps():
    words = f"cuda_graph_impl=full_iteration activation_offload=attention {MOE}"
    assert graph_options(words).offload.max_inflight == 1
    assert graph_options(words, "fine_grained_offloading_max_inflight_offloads=3").offload.max_inflight == 3


@pytest.mark.parametrize(
    "words, reason",
    [
        (f"{TE} activation_offload=attention", "whole layers"),
        ("activation_offload=merger", "no such part"),
        ("activation_offload=mlp num_moe_experts=null", "experts only"),
        ("cuda_graph_impl=local activation_offload=attention", "experts only"),
        (f"{TE} cuda_graph_modules=moe activation_offload=all {MOE}", "captured MoE layers"),
        (f"moe_paged_stash=true activation_offload=mlp {MOE}", "moe_paged_stash holds"),
    ],
)
def test_where_nothing_would_leave_it_is_refused(words, reason):
    with pytest.raises(OptionError, match=reason) as caught:
        graph_options(words)
    assert caught.value.field == "activation_offload" and "it must be" in str(caught.value)


@pytest.mark.parametrize(
    "words, field",
    [
        (f"{VISION} vision_cuda_graph_offload=mlp", "vision_cuda_graph_offload"),
        (f"{PACKED} cuda_graph_packed_offload=all", "cuda_graph_packed_offload"),
        ("fine_grained_activation_offloading=true", "fine_grained_activation_offloading"),
        ("fine_grained_activation_offloading=false", "fine_grained_activation_offloading"),
        ("offload_modules=core_attn", "offload_modules"),
        ("cpu_offloading=true", "model.cpu_offloading"),
        ("recompute_granularity=full", "model.recompute_granularity"),
        ("recompute_granularity=selective recompute_modules=core_attn", "model.recompute_modules"),
    ],
)
def test_two_that_say_different_things_are_refused(words, field):
    with pytest.raises(OptionError) as caught:
        graph_options(f"{words} activation_offload=attention")
    assert caught.value.field == field


def test_a_memory_target_may_use_what_is_shared():
    found = graph_options(f"{VISION} activation_offload=mlp vision_cuda_graph_offload_above_gb=6").vision
    assert found.offload == ("mlp",) and found.offload_above_gb == 6


def test_releases_that_cannot_wait_inside_graphs_keep_captured_attention():
    old = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        cuda_graph_scope=["attn"],
        num_moe_experts=8,
        activation_offload=["attention", "mlp"],
    )
    assert normalize(old)[0].offload.modules == ("expert_fc1", "moe_act")
    old.delay_offload_until_cuda_graph = False  # the release that can
    assert "core_attn" in normalize(old)[0].offload.modules


@given(
    parts=st.lists(st.sampled_from(OFFLOAD_MODULES), min_size=1, unique=True),
    words=st.sampled_from([*LEAVING, VISION, PACKED, f"{VISION} {PACKED}", MOE]),
)
def test_what_was_shared_once_is_shared_again_to_the_same(parts, words):
    try:
        options = normalize(words, {"activation_offload": parts})[0]
    except OptionError:
        return
    again = normalize(options, {})[0]
    assert (again.vision, again.packed) == (options.vision, options.packed)
    assert again.offload == options.offload or not options.offload.enabled
    of_parts = {module for part in parts for module in CORE_MODULES.get(part, ())}
    assert set(options.offload.modules) <= of_parts and isinstance(again, GraphOptions)
