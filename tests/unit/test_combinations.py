"""Every combination of options that cannot work is refused, with its reason."""

import re
from functools import partial

import pytest

from bridge_cg_plugin.options import OptionError, graph_options, normalize
from bridge_cg_plugin.options.combinations import ALLOWED, refusals
from bridge_cg_plugin.options.facts import EXPERTS, LOOP_PARTS, OFFLOADS, ROUTERS
from bridge_cg_plugin.options.sources import Written

from .option_words import (
    FP8,
    FULL,
    OFFLOAD,
    PACKED,
    TE,
    VISION,
    gemma3,
    nemotron,
    offloading,
    tower_of_hugging_face,
)

other_tower = partial(tower_of_hugging_face, "Ministral3ModelProvider")
one_gpus_rows = partial(other_tower, pad_to_max_length=False)
WHOLE_MOE = f"{TE} {PACKED} num_moe_experts=8"
NEEDED = ROUTERS | EXPERTS
# What a user wrote, and the field that the refusal names.
REFUSED = [
    ("cuda_graph_impl=local inference_cuda_graph_scope=none", "inference_cuda_graph_scope"),
    (f"{TE} inference_cuda_graph_scope=layer", "inference_cuda_graph_scope"),
    (f"{FULL} cuda_graph_modules=attn", "cuda_graph_modules"),
    (Written({"cuda_graph_impl": "full_iteration"}, settings={LOOP_PARTS: ()}), "cuda_graph_impl"),
    (f"{TE} cpu_offloading=true", "model.cpu_offloading"),
    (f"{TE} rng.te_rng_tracker=false", "rng.te_rng_tracker"),
    (f"{TE} recompute_granularity=full", "model.recompute_granularity"),
    (f"{TE} recompute_granularity=selective recompute_modules=mlp hidden_dropout=0.1", "model.recompute_granularity"),
    (f"{TE} variable_seq_lengths=true", "model.variable_seq_lengths"),
    (f"{FULL} rerun_state_machine.check_for_nan_in_loss=true", "rerun_state_machine.check_for_nan_in_loss"),
    (f"{FULL} {VISION} context_parallel_size=2", "model.context_parallel_size"),
    (f"{FULL} {VISION} dataset.enable_in_batch_packing=true", "dataset.enable_in_batch_packing"),
    (f"{FULL} {VISION} recompute_granularity=selective recompute_modules=mla_up_proj", "model.recompute_granularity"),
    (f"{FULL} {VISION} recompute_granularity=full hidden_dropout=0.1", "model.recompute_granularity"),
    (f"{FULL} {VISION} num_moe_experts=8 moe_input_jitter_eps=0.1", "model.moe_input_jitter_eps"),
    (f"{FULL} {VISION} multi_latent_attention=true", "model.multi_latent_attention"),
    (f"{FULL} {VISION} cpu_offloading=true", "model.cpu_offloading"),
    (f"{FULL} {VISION} cuda_graph_warmup_steps=0", "model.cuda_graph_warmup_steps"),
    (f"{FULL} {VISION} quant_recipe=recipe.yaml", "model.quant_recipe"),
    (f"{FULL} {VISION} fp8=hybrid", "model.fp8"),
    (f"{VISION} ddp.use_megatron_fsdp=true", "ddp.use_megatron_fsdp"),
    (f"{VISION} dist.use_torch_fsdp2=true", "dist.use_torch_fsdp2"),
    (f"{VISION} recompute_granularity=full vision_cuda_graph_offload=attention", "model.recompute_granularity"),
    (nemotron(fp8="hybrid"), "model.fp8"),
    (nemotron(cpu_offloading=True), "model.cpu_offloading"),
    (PACKED, "cuda_graph_impl"),
    (f"{TE} dataset.enable_in_batch_packing=true", "cuda_graph_max_packed_seqs"),
    (f"{TE} {PACKED} cuda_graph_modules=moe", "cuda_graph_modules"),
    (f"{WHOLE_MOE} expert_tensor_parallel_size=2", "model.expert_tensor_parallel_size"),
    (f"{WHOLE_MOE} peft.target_modules=[linear_qkv,linear_fc1]", "peft.target_modules"),
    (f"{WHOLE_MOE} moe_router_force_load_balancing=true", "model.moe_router_force_load_balancing"),
    (f"{WHOLE_MOE} cuda_graph_modules=attn,moe_router moe_input_jitter_eps=0.1", "model.moe_input_jitter_eps"),
    (f"{TE} {PACKED} context_parallel_size=2 cp_comm_type=all_gather", "model.cp_comm_type"),
    (
        tower_of_hugging_face(
            cuda_graph_impl="transformer_engine", cuda_graph_max_packed_seqs=64, context_parallel_size=2
        ),
        "model.context_parallel_size",
    ),
    (f"{TE} {PACKED} recompute_granularity=selective recompute_modules=mla_up_proj", "model.recompute_granularity"),
    (
        f"{WHOLE_MOE} cuda_graph_modules=attn,moe_router recompute_granularity=selective recompute_modules=moe",
        "model.recompute_granularity",
    ),
    (f"{WHOLE_MOE} cuda_graph_modules=attn,mlp recompute_granularity=full", "model.recompute_granularity"),
    (f"{TE} {PACKED} recompute_granularity=selective cuda_graph_packed_recompute=all", "model.recompute_granularity"),
    (f"{TE} {PACKED} hidden_dropout=0.1", "model.hidden_dropout"),
    (f"{TE} {PACKED} multi_latent_attention=true", "model.multi_latent_attention"),
    (f"{TE} {PACKED} fp4=e2m1", "model.fp4"),
    (f"{TE} {PACKED} quant_recipe=recipe.yaml", "model.quant_recipe"),
    (f"{TE} {PACKED} fp8=hybrid fp8_recipe=mxfp8", "model.fp8_recipe"),
    (f"{TE} {PACKED} {FP8} fp8_multi_head_attention=true", "model.fp8_multi_head_attention"),
    (f"{TE} {PACKED} fp8=hybrid fp8_recipe=delayed cuda_graph_modules=attn", "model.fp8_recipe"),
    (f"{TE} {PACKED} {FP8} num_moe_experts=8", "model.fp8"),
    (f"{TE} {PACKED} {FP8} add_bias_linear=true", "model.add_bias_linear"),
    (f"{TE} {PACKED} {FP8} normalization=LayerNorm", "model.normalization"),
    (f"{TE} {PACKED} {FP8} context_parallel_size=2 add_qkv_bias=true", "model.add_qkv_bias"),
    (f"{TE} {PACKED} {FP8} hybrid_layer_pattern=M*", "model.fp8"),
    (f"{TE} {PACKED} {FP8} tensor_model_parallel_size=2", "model.tensor_model_parallel_size"),
    (
        f"{TE} {PACKED} experimental_attention_variant=gated_delta_net context_parallel_size=2",
        "model.context_parallel_size",
    ),
    (f"{TE} {PACKED} ddp.use_megatron_fsdp=true", "ddp.use_megatron_fsdp"),
    (f"{TE} {PACKED} cuda_graph_warmup_steps=0", "model.cuda_graph_warmup_steps"),
    (f"{TE} {PACKED} {OFFLOAD}core_attn", "fine_grained_activation_offloading"),
    (other_tower(cuda_graph_impl="full_iteration"), "cuda_graph_impl"),
    (gemma3(cuda_graph_impl="transformer_engine"), "cuda_graph_impl"),
    (one_gpus_rows(cuda_graph_impl="transformer_engine"), "dataset.pad_to_max_length"),
    (one_gpus_rows(vision_cuda_graph_impl="none", cuda_graph_impl="full_iteration"), "dataset.pad_to_max_length"),
    (f"{OFFLOAD}core_attn {TE}", "cuda_graph_modules"),
    (
        nemotron(fine_grained_activation_offloading=True, offload_modules=["core_attn"]),
        "fine_grained_activation_offloading",
    ),
    (offloading(vision_cuda_graph_impl="none", cuda_graph_impl="full_iteration"), OFFLOADS),
    (
        f"{TE} recompute_granularity=selective recompute_modules=core_attn attention_dropout=0.1",
        "model.recompute_granularity",
    ),
    (f"{TE} recompute_granularity=selective recompute_modules=moe hidden_dropout=0.1", "model.recompute_granularity"),
    (f"{FULL} {VISION} dataset.pack_sequences_in_batch=true", "dataset.pack_sequences_in_batch"),
    (
        f"{TE} cuda_graph_modules=mamba hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true",
        "cuda_graph_max_packed_seqs",
    ),
    (f"{FULL} {VISION} fp4=e2m1", "model.fp4"),
    (nemotron(fp4="e2m1"), "model.fp4"),
    (f"{TE} {PACKED} attention_dropout=0.1", "model.attention_dropout"),
    (f"{TE} {PACKED} {FP8} fp8_dot_product_attention=true", "model.fp8_dot_product_attention"),
    (f"{WHOLE_MOE} moe_router_load_balancing_type=sinkhorn", "model.moe_router_load_balancing_type"),
    (f"{WHOLE_MOE} moe_router_fusion=true moe_aux_loss_coeff=0.01", "model.moe_router_fusion"),
    *((f"{WHOLE_MOE} {name}={'1' if needed is None else 'true'}", f"model.{name}") for name, needed in NEEDED.items()),
]


def test_what_starts_eager_is_refused_with_graphs_alone():
    offloads = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    assert not found_in(nemotron(vision_cuda_graph_impl="none", cuda_graph_impl="none", **offloads))


def found_in(source):
    options, written = normalize(source)
    return list(refusals(options, written.facts))


def test_every_setting_of_every_allow_list_has_a_case():
    listed = [(field, reason) for _, _, settings in ALLOWED for field, (_, reason) in settings.items()]
    found = [each for source, _ in REFUSED for each in found_in(source)]
    assert [(f, reason) for f, reason in listed if not any(e.field == f and reason in str(e) for e in found)] == []


@pytest.mark.parametrize("source, field", REFUSED, ids=str)
def test_refused_once_with_its_reason_and_a_remedy(source, field):
    (found,) = found_in(source)
    with pytest.raises(OptionError, match=re.escape(str(found))) as caught:
        graph_options(source)
    assert caught.value.field == field
    assert re.search(r"Cannot use .*=.*: it must be .+\. .+\.", str(found))


def test_experts_beside_mamba_layers_get_the_parts_to_name():
    with pytest.raises(OptionError, match="set cuda_graph_modules=attn,moe_router,mamba"):
        graph_options(f"{WHOLE_MOE} expert_tensor_parallel_size=4 hybrid_layer_pattern=M*ME")


def test_experts_are_divided_like_layers_where_nothing_is_set():
    with pytest.raises(OptionError, match="expert_tensor_parallel_size=2: it must be 1 with"):
        graph_options(f"{WHOLE_MOE} tensor_model_parallel_size=2")
    graph_options(f"{WHOLE_MOE} tensor_model_parallel_size=2 expert_tensor_parallel_size=1")


@pytest.mark.parametrize(
    "words", ["attention_dropout=much", "num_moe_experts=[8]", "variable_seq_lengths=often", "rng.te_rng_tracker=maybe"]
)
def test_settings_of_the_wrong_kind(words):
    with pytest.raises(OptionError, match=re.escape(words.split("=")[0].split(".")[-1])):
        graph_options(f"{TE} {words}")


# What must not be refused because of a rule for others.
ACCEPTED = [
    f"{TE} cuda_graph_modules=mlp dataset.enable_in_batch_packing=true",
    f"{TE} cuda_graph_modules=mlp hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true",
    f"{TE} {PACKED} cuda_graph_modules=attn,mamba hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true",
    f"{TE} {PACKED} hybrid_layer_pattern=M*M- context_parallel_size=2 cp_comm_type=a2a",
    f"{TE} {PACKED} num_moe_experts=8 cuda_graph_packed_offload=all cuda_graph_packed_recompute=all",
    f"{TE} {PACKED} num_moe_experts=8 peft.target_modules=[linear_qkv,vision_model.*.linear_fc1]",
    f"{TE} {PACKED} cuda_graph_modules=attn,moe_router num_moe_experts=8 peft.target_modules=[linear_fc1]",
    f"{TE} rng.te_rng_tracker=false model.use_te_rng_tracker=true",
    f"{WHOLE_MOE} recompute_granularity=selective recompute_modules=moe,moe_act,layernorm,shared_experts",
    f"{WHOLE_MOE} cuda_graph_modules=attn,moe_router recompute_granularity=selective recompute_modules=moe_act",
    f"{WHOLE_MOE} cuda_graph_modules=attn recompute_granularity=selective recompute_modules=moe,layernorm",
    f"{TE} recompute_granularity=selective recompute_modules=core_attn",
    f"{TE} cuda_graph_modules=attn recompute_granularity=selective recompute_modules=mlp hidden_dropout=0.1",
    "variable_seq_lengths=true",
    f"{FULL} {VISION} pipeline_model_parallel_size=2 context_parallel_size=1 num_moe_experts=8 mtp_num_layers=1",
    f"{FULL} {VISION} recompute_granularity=full hidden_dropout=0 attention_dropout=0",
    f"{FULL} pipeline_model_parallel_size=2 num_moe_experts=8 fp8=hybrid recompute_granularity=full",
    f"{TE} {VISION} pipeline_model_parallel_size=2 context_parallel_size=2 cuda_graph_modules=attn,mlp",
    f"{TE} rerun_state_machine.check_for_nan_in_loss=true",
    f"{VISION} recompute_granularity=selective recompute_modules=moe_act",
    f"{TE} {PACKED} context_parallel_size=1 cp_comm_type=all_gather",
    f"{TE} {PACKED} context_parallel_size=4 cp_comm_type=a2a+p2p hierarchical_context_parallel_sizes=2,2",
    f"{TE} {PACKED} variable_seq_lengths=true dataset.enable_in_batch_packing=true fp8=null",
    f"{TE} {PACKED} {FP8} cuda_graph_modules=attn,moe_router num_moe_experts=8",
    f"{TE} {PACKED} fp8=e4m3 fp8_recipe=delayed fp8_param=true",
    f"{TE} {PACKED} cuda_graph_modules=attn num_moe_experts=8 hidden_dropout=0 attention_dropout=0.0",
    f"{OFFLOAD}core_attn,attn_proj {TE} cuda_graph_modules=attn cuda_graph_warmup_steps=3",
    f"{OFFLOAD}core_attn {FULL} fine_grained_offloading_max_inflight_offloads=1",
    tower_of_hugging_face(recompute_granularity="full"),
    one_gpus_rows(),
    one_gpus_rows(cuda_graph_impl="transformer_engine", pipeline_model_parallel_size=2),
    one_gpus_rows(cuda_graph_impl="transformer_engine", cuda_graph_max_packed_seqs=8),
    *(tower_of_hugging_face(**{name: value}) for name, value in (("fp8", "hybrid"), ("cpu_offloading", True))),
    nemotron(vision_cuda_graph_impl="none", fp8="hybrid", cpu_offloading=True),
]


@pytest.mark.parametrize("source", ACCEPTED, ids=str)
def test_what_can_work_passes(source):
    graph_options(source)
