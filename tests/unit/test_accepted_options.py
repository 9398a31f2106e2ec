"""Options that go together: what must not be refused because of a rule for others."""

from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import (
    CudaGraphModule,
    OptionError,
    graph_options,
    normalize,
)

from .option_words import FP8, FULL, LOCAL, OFFLOAD, PACKED, TE, VISION, nemotron, offloading, tower_of_hugging_face


@pytest.mark.parametrize("setting", [{"fp8": "hybrid"}, {"fp4": "e2m1"}, {"cpu_offloading": True}])
def test_settings_of_layers_do_not_reach_a_tower_of_hugging_face(setting):
    graph_options(tower_of_hugging_face(**setting))
    graph_options(nemotron(**{"vision_cuda_graph_impl": "none", **setting}))
    with pytest.raises(OptionError):
        graph_options(nemotron(**setting))


def test_recompute_does_not_reach_a_tower_of_hugging_face():
    graph_options(tower_of_hugging_face(recompute_granularity="full"))


def test_full_iteration_on_a_model_with_such_a_tower_is_upstreams_own():
    written = normalize(tower_of_hugging_face(vision_cuda_graph_impl="none", pipeline_model_parallel_size=2))[1]
    facts = written.facts
    assert facts.other_tower and not facts.images


ACCEPTED = [
    "",
    TE,
    f"{TE} cuda_graph_modules=attn,mlp",
    f"{TE} cuda_graph_modules=mlp dataset.enable_in_batch_packing=true",
    f"{TE} cuda_graph_modules=moe_router,moe_preprocess num_moe_experts=8",
    f"{TE} cuda_graph_modules=mamba",
    f"{TE} cuda_graph_modules=mamba hybrid_layer_pattern=M*M-",
    f"{TE} cuda_graph_modules=mlp hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true",
    f"{TE} {PACKED} cuda_graph_modules=attn,mamba hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true",
    f"{TE} {PACKED} hybrid_layer_pattern=M*M-",
    f"{TE} {PACKED} hybrid_layer_pattern=M*M- context_parallel_size=2 cp_comm_type=a2a",
    f"{TE} {PACKED} num_moe_experts=8",
    f"{TE} {PACKED} num_moe_experts=8 cuda_graph_packed_offload_above_gb=4",
    f"{TE} {PACKED} num_moe_experts=8 cuda_graph_packed_offload=all cuda_graph_packed_recompute=all",
    f"{TE} {PACKED} cuda_graph_modules=attn,mlp cuda_graph_packed_offload=all",
    f"{TE} {PACKED} num_moe_experts=8 peft.target_modules=[linear_qkv,vision_model.*.linear_fc1]",
    f"{TE} {PACKED} cuda_graph_modules=attn,moe_router num_moe_experts=8 peft.target_modules=[linear_fc1]",
    f"{TE} {PACKED} peft.target_modules=[linear_qkv,linear_fc1]",
    f"{TE} {PACKED} num_moe_experts=8 expert_model_parallel_size=8",
    f"{TE} {PACKED} cuda_graph_modules=attn,moe_router num_moe_experts=8 expert_model_parallel_size=8",
    f"{TE} rng.te_rng_tracker=true",
    f"{TE} rng.te_rng_tracker=false model.use_te_rng_tracker=true",
    f"{TE} recompute_granularity=selective recompute_modules=core_attn",
    f"{TE} cuda_graph_modules=attn recompute_granularity=selective recompute_modules=mlp hidden_dropout=0.1",
    f"{TE} recompute_granularity=selective recompute_modules=mlp hidden_dropout=0.0",
    f"{TE} variable_seq_lengths=false",
    "variable_seq_lengths=true",
    FULL,
    f"{FULL} {VISION}",
    f"{FULL} {VISION} pipeline_model_parallel_size=1 context_parallel_size=1 num_moe_experts=null mtp_num_layers=0",
    f"{FULL} pipeline_model_parallel_size=2 num_moe_experts=8 fp8=hybrid recompute_granularity=full",
    f"{TE} {VISION} pipeline_model_parallel_size=2 context_parallel_size=2",
    f"{FULL} recompute_granularity=full",
    f"{FULL} rerun_state_machine.check_for_nan_in_loss=false",
    f"{TE} rerun_state_machine.check_for_nan_in_loss=true",
    f"{LOCAL} cuda_graph_modules=moe_preprocess",
    f"{LOCAL} inference_cuda_graph_scope=block",
    f"{TE} {VISION} cuda_graph_modules=attn,mlp",
    f"{VISION} recompute_granularity=selective recompute_modules=moe_act",
    f"{TE} {PACKED}",
    f"{TE} {PACKED} context_parallel_size=2",
    f"{TE} {PACKED} {VISION} context_parallel_size=2",
    f"{TE} {PACKED} context_parallel_size=2 cp_comm_type=p2p",
    f"{TE} {PACKED} context_parallel_size=1 cp_comm_type=a2a",
    f"{TE} {PACKED} context_parallel_size=3 num_query_groups=4",
    f"{TE} {PACKED} context_parallel_size=4 cp_comm_type=a2a num_query_groups=8 tensor_model_parallel_size=2",
    f"{TE} {PACKED} context_parallel_size=2 cp_comm_type=a2a",
    f"{TE} {PACKED} context_parallel_size=4 cp_comm_type=a2a+p2p num_query_groups=2"
    " hierarchical_context_parallel_sizes=2,2",
    f"{TE} {PACKED} variable_seq_lengths=true dataset.enable_in_batch_packing=true fp8=null",
    f"{TE} {PACKED} {FP8} cuda_graph_modules=attn context_parallel_size=2",
    f"{TE} {PACKED} {FP8} cuda_graph_modules=attn,moe_router num_moe_experts=8",
    f"{TE} {PACKED} fp8=e4m3 fp8_recipe=delayed fp8_param=true",
    f"{TE} {PACKED} fp8=e4m3 fp8_recipe=blockwise cuda_graph_packed_offload=all",
    f"{TE} {PACKED} cuda_graph_modules=attn num_moe_experts=8 hidden_dropout=0 attention_dropout=0.0",
    "dataset.enable_offline_packing=true",
    f"{OFFLOAD}core_attn,attn_proj {TE} cuda_graph_modules=attn cuda_graph_warmup_steps=3",
    f"{OFFLOAD}mlp_norm {TE} cuda_graph_modules=attn,mlp",
    f"{OFFLOAD}mlp_norm {TE} cuda_graph_modules=mlp",
    f"{OFFLOAD}attn_norm {TE} cuda_graph_modules=mlp multi_latent_attention=false",
    f"{OFFLOAD}qkv_linear multi_latent_attention=true mla_down_proj_fusion=false",
    f"{OFFLOAD}qkv_linear mla_down_proj_fusion=true experimental_attention_variant=dsa",
    f"{OFFLOAD}core_attn,attn_proj multi_latent_attention=true mla_down_proj_fusion=true",
    f"{OFFLOAD}attn_norm {TE} cuda_graph_modules=moe_router multi_latent_attention=true",
    f"{OFFLOAD}attn_norm,moe_act recompute_granularity=selective recompute_modules=layernorm,moe_act",
    offloading(cuda_graph_impl="transformer_engine", cuda_graph_modules=["mlp"], offload_modules=["core_attn"]),
    f"{OFFLOAD}moe_act {LOCAL} cuda_graph_modules=attn",
    f"{OFFLOAD}core_attn {FULL} fine_grained_offloading_max_inflight_offloads=1",
    f"{OFFLOAD}core_attn {TE} cuda_graph_modules=attn fine_grained_offloading_max_inflight_offloads=0",
    f"{OFFLOAD}moe_act {TE} cuda_graph_modules=attn fine_grained_offloading_max_inflight_offloads=1",
    f"{OFFLOAD}core_attn cuda_graph_warmup_steps=0 cuda_graph_impl=none",
    f"{OFFLOAD}core_attn,fused_group_mlp use_transformer_engine_op_fuser=true num_moe_experts=8",
    f"{OFFLOAD}core_attn moe_paged_stash=true num_moe_experts=8",
    "cuda_graph_modules=moe cuda_graph_impl=transformer_engine",
]


@pytest.mark.parametrize("words", ACCEPTED)
def test_what_can_work_passes(words):
    graph_options(words)


def test_local_takes_router_and_preprocessing_as_one():
    found = graph_options(f"{LOCAL} cuda_graph_modules=moe_preprocess").language_model
    assert found.modules == (CudaGraphModule.moe_preprocess, CudaGraphModule.moe_router)


def test_modules_of_a_recipe_with_graphs_off_are_not_refused():
    recipe = SimpleNamespace(cuda_graph_impl="none", cuda_graph_scope=["mlp"])
    found = graph_options(recipe)
    assert not found.enabled and "has no effect" in found.warnings[-1]
    graph_options(recipe, "cuda_graph_impl=none")
