"""Every combination of options that cannot work is refused, with its reason."""

import re

import pytest

from bridge_cg_plugin.options import OptionError, facts_of, graph_options, normalize
from bridge_cg_plugin.options.combinations import COMBINATIONS
from bridge_cg_plugin.options.facts import LOOP_PARTS
from bridge_cg_plugin.options.sources import Written

from .option_words import FP8, FULL, LOCAL, OFFLOAD, PACKED, TE, VISION, nemotron, offloading, tower_of_hugging_face

# The combination -> what a user wrote, and the field that the refusal names.
REFUSED = {
    "`full_iteration` with modules": (f"{FULL} cuda_graph_modules=attn", "cuda_graph_modules"),
    "modules with `cuda_graph_impl=none`": ("cuda_graph_impl=none cuda_graph_scope=attn", "cuda_graph_modules"),
    "an inference scope that the implementation does not have": (
        f"{TE} inference_cuda_graph_scope=layer",
        "inference_cuda_graph_scope",
    ),
    "language-model graphs other than those of packs in a loop other than Bridge's": (
        Written({"cuda_graph_impl": "full_iteration"}, settings={LOOP_PARTS: ()}),
        "cuda_graph_impl",
    ),
    "graphs of single layers or of packs with `cpu_offloading`": (f"{TE} cpu_offloading=true", "model.cpu_offloading"),
    "`moe` with `moe_router`": (f"{TE} cuda_graph_modules=moe,moe_router", "cuda_graph_modules"),
    "`moe_preprocess` without `moe_router`": (f"{TE} cuda_graph_modules=moe_preprocess", "cuda_graph_modules"),
    "MoE modules on a model without MoE layers": (
        f"{TE} cuda_graph_modules=moe_router num_moe_experts=null",
        "cuda_graph_modules",
    ),
    "`mamba` on a model without Mamba layers": (
        f"{TE} cuda_graph_modules=mamba hybrid_layer_pattern=**--",
        "cuda_graph_modules",
    ),
    "graphs without `te_rng_tracker`": (f"{TE} rng.te_rng_tracker=false", "rng.te_rng_tracker"),
    "full recompute with per-layer graphs": (f"{TE} recompute_granularity=full", "model.recompute_granularity"),
    "recompute of `moe` with a captured `moe_router`": (
        f"{TE} cuda_graph_modules=moe_router recompute_granularity=selective recompute_modules=moe",
        "model.recompute_modules",
    ),
    "recompute with dropout inside captured modules": (
        f"{TE} recompute_granularity=selective recompute_modules=mlp hidden_dropout=0.1",
        "model.hidden_dropout",
    ),
    "`variable_seq_lengths` with language-model graphs": (
        f"{TE} variable_seq_lengths=true",
        "model.variable_seq_lengths",
    ),
    "NaN check of the loss with `full_iteration`": (
        f"{FULL} rerun_state_machine.check_for_nan_in_loss=true",
        "rerun_state_machine.check_for_nan_in_loss",
    ),
    "`full_iteration` on a model that takes images, with pipeline parallelism": (
        f"{FULL} {VISION} pipeline_model_parallel_size=2",
        "model.pipeline_model_parallel_size",
    ),
    "`full_iteration` on a model that takes images, with context parallelism": (
        f"{FULL} {VISION} context_parallel_size=2",
        "model.context_parallel_size",
    ),
    "`full_iteration` on a model that takes images, with in-batch packing": (
        f"{FULL} {VISION} dataset.enable_in_batch_packing=true",
        "dataset.enable_in_batch_packing",
    ),
    "`full_iteration` on a model that takes images, with recompute": (
        f"{FULL} {VISION} recompute_granularity=selective recompute_modules=moe_act",
        "model.recompute_granularity",
    ),
    "`full_iteration` on a model that takes images, with mixture-of-experts layers": (
        f"{FULL} {VISION} num_moe_experts=8",
        "model.num_moe_experts",
    ),
    "`full_iteration` on a model that takes images, with multi-token prediction": (
        f"{FULL} {VISION} mtp_num_layers=1",
        "model.mtp_num_layers",
    ),
    "`full_iteration` on a model that takes images, with fp8 or fp4": (
        f"{FULL} {VISION} fp8=hybrid",
        "model.fp8",
    ),
    "Megatron-FSDP with vision graphs, or with `full_iteration` on a model that takes images": (
        f"{VISION} ddp.use_megatron_fsdp=true",
        "ddp.use_megatron_fsdp",
    ),
    "PyTorch's FSDP2 with vision graphs, or with `full_iteration` on a model that takes images": (
        f"{VISION} dist.use_torch_fsdp2=true",
        "dist.use_torch_fsdp2",
    ),
    "vision graphs with recompute that reaches the vision encoder": (
        f"{VISION} recompute_granularity=selective",
        "model.recompute_granularity",
    ),
    "vision graphs of Nemotron's encoder with fp8 or fp4": (nemotron(fp8="hybrid"), "model.fp8"),
    "vision graphs of Nemotron's encoder with `cpu_offloading`": (
        nemotron(cpu_offloading=True),
        "model.cpu_offloading",
    ),
    "packed-sequence graphs without `cuda_graph_impl=transformer_engine`": (PACKED, "cuda_graph_impl"),
    "packed data with graphs of attention or Mamba layers over unpacked sequences": (
        f"{TE} dataset.enable_in_batch_packing=true",
        "cuda_graph_max_packed_seqs",
    ),
    "packed-sequence graphs of other modules than attn, mlp, moe_router and mamba": (
        f"{TE} {PACKED} cuda_graph_modules=moe",
        "cuda_graph_modules",
    ),
    "packed-sequence graphs of whole layers with expert tensor parallelism": (
        f"{TE} {PACKED} num_moe_experts=8 expert_tensor_parallel_size=2",
        "model.expert_tensor_parallel_size",
    ),
    "packed-sequence graphs of whole layers with adapters on experts": (
        f"{TE} {PACKED} num_moe_experts=8 peft.target_modules=[linear_qkv,linear_fc1]",
        "peft.target_modules",
    ),
    "packed-sequence graphs of whole layers with other settings of experts or routers": (
        f"{TE} {PACKED} num_moe_experts=8 moe_router_force_load_balancing=true",
        "model.moe_router_force_load_balancing",
    ),
    "packed-sequence graphs of routers with jitter on their input": (
        f"{TE} {PACKED} num_moe_experts=8 cuda_graph_modules=attn,moe_router moe_input_jitter_eps=0.1",
        "model.moe_input_jitter_eps",
    ),
    "packed-sequence graphs with context parallelism by `all_gather`": (
        f"{TE} {PACKED} context_parallel_size=2 cp_comm_type=all_gather",
        "model.cp_comm_type",
    ),
    "packed-sequence graphs with context parallelism by `a2a` over ranks that do not divide the heads": (
        f"{TE} {PACKED} context_parallel_size=4 cp_comm_type=a2a num_query_groups=4 tensor_model_parallel_size=2",
        "model.cp_comm_type",
    ),
    "packed-sequence graphs with context parallelism on a model that takes images other than Qwen3-VL": (
        tower_of_hugging_face(
            cuda_graph_impl="transformer_engine", cuda_graph_max_packed_seqs=64, context_parallel_size=2
        ),
        "model.context_parallel_size",
    ),
    "packed-sequence graphs with a bucket that ranks cannot share in equal parts": (
        f"{TE} {PACKED} cuda_graph_packed_buckets=512,1022 tensor_model_parallel_size=1 context_parallel_size=2",
        "cuda_graph_packed_buckets",
    ),
    "packed-sequence graphs with recompute": (
        f"{TE} {PACKED} recompute_granularity=selective",
        "model.recompute_granularity",
    ),
    "packed-sequence graphs with dropout": (f"{TE} {PACKED} hidden_dropout=0.1", "model.hidden_dropout"),
    "packed-sequence graphs with multi-latent attention": (
        f"{TE} {PACKED} multi_latent_attention=true",
        "model.multi_latent_attention",
    ),
    "packed-sequence graphs with fp4": (f"{TE} {PACKED} fp4=e2m1", "model.fp4"),
    "packed-sequence graphs with a precision for each module": (
        f"{TE} {PACKED} quant_recipe=recipe.yaml",
        "model.quant_recipe",
    ),
    "packed-sequence graphs in fp8 with another recipe than tensorwise, delayed or blockwise": (
        f"{TE} {PACKED} fp8=hybrid fp8_recipe=mxfp8",
        "model.fp8_recipe",
    ),
    "packed-sequence graphs in fp8 with attention in fp8": (
        f"{TE} {PACKED} {FP8} fp8_multi_head_attention=true",
        "model.fp8_multi_head_attention",
    ),
    "packed-sequence graphs of parts of layers with delayed scaling": (
        f"{TE} {PACKED} fp8=hybrid fp8_recipe=delayed cuda_graph_modules=attn",
        "model.fp8_recipe",
    ),
    "packed-sequence graphs of whole layers in fp8 with experts": (
        f"{TE} {PACKED} {FP8} num_moe_experts=8",
        "model.fp8",
    ),
    "packed-sequence graphs in fp8 with Mamba layers": (
        f"{TE} {PACKED} {FP8} hybrid_layer_pattern=M*",
        "model.fp8",
    ),
    "packed-sequence graphs in fp8 with tensor parallelism": (
        f"{TE} {PACKED} {FP8} tensor_model_parallel_size=2",
        "model.tensor_model_parallel_size",
    ),
    "packed-sequence graphs with Megatron-FSDP": (
        f"{TE} {PACKED} ddp.use_megatron_fsdp=true",
        "ddp.use_megatron_fsdp",
    ),
    "graphs after fewer than no warm-up steps": (
        f"{VISION} cuda_graph_warmup_steps=-1",
        "model.cuda_graph_warmup_steps",
    ),
    "packed-sequence graphs without warm-up steps": (
        f"{TE} {PACKED} cuda_graph_warmup_steps=0",
        "model.cuda_graph_warmup_steps",
    ),
    "packed-sequence graphs with megatron-core's activation offloading": (
        f"{TE} {PACKED} {OFFLOAD}core_attn",
        "fine_grained_activation_offloading",
    ),
    "vision graphs of an encoder other than these with `full_iteration`": (
        tower_of_hugging_face(cuda_graph_impl="full_iteration"),
        "cuda_graph_impl",
    ),
    "offloading without modules": ("fine_grained_activation_offloading=true", "offload_modules"),
    "offloading `attn_proj` without `core_attn`": (f"{OFFLOAD}attn_proj", "offload_modules"),
    "offloading with `local` graphs, apart from parts of MoE layers": (
        f"{OFFLOAD}core_attn {LOCAL}",
        "offload_modules",
    ),
    "offloading with `full_iteration` and no limit in flight": (
        f"{OFFLOAD}core_attn {FULL}",
        "fine_grained_offloading_max_inflight_offloads",
    ),
    "offloading with `cpu_offloading`": (f"{OFFLOAD}core_attn cpu_offloading=true", "model.cpu_offloading"),
    "offloading with full recompute": (
        f"{OFFLOAD}core_attn recompute_granularity=full",
        "model.recompute_granularity",
    ),
    "offloading `core_attn` with recompute of it": (
        f"{OFFLOAD}core_attn recompute_granularity=selective recompute_modules=core_attn",
        "model.recompute_modules",
    ),
    "offloading inside MoE layers with recompute of `moe`": (
        f"{OFFLOAD}moe_act recompute_granularity=selective recompute_modules=moe num_moe_experts=8",
        "model.recompute_modules",
    ),
    "offloading with graphs of whole layers by Transformer Engine": (f"{OFFLOAD}core_attn {TE}", "cuda_graph_modules"),
    "offloading inside captured attention on releases before 0.6": (
        offloading(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"], offload_modules=["core_attn"]),
        "offload_modules",
    ),
    "offloading beside captured `moe`": (f"{OFFLOAD}core_attn {TE} cuda_graph_modules=moe", "cuda_graph_modules"),
    "offloading inside captured attention with a limit in flight above 0": (
        f"{OFFLOAD}core_attn {TE} cuda_graph_modules=attn fine_grained_offloading_max_inflight_offloads=1",
        "fine_grained_offloading_max_inflight_offloads",
    ),
    "offloading with graphs and no warm-up steps": (
        f"{OFFLOAD}core_attn {TE} cuda_graph_modules=mlp cuda_graph_warmup_steps=0",
        "model.cuda_graph_warmup_steps",
    ),
    "offloading `attn_norm` with captured attention": (
        f"{OFFLOAD}attn_norm {TE} cuda_graph_modules=attn",
        "offload_modules",
    ),
    "offloading `attn_norm` behind captured MLPs or Mamba layers": (
        f"{OFFLOAD}attn_norm {TE} cuda_graph_modules=mlp",
        "offload_modules",
    ),
    "offloading `qkv_linear` of latent attention with `mla_down_proj_fusion`": (
        f"{OFFLOAD}qkv_linear multi_latent_attention=true mla_down_proj_fusion=true",
        "offload_modules",
    ),
    "offloading `mlp_norm` if only attention or only the MLP is captured, or a router": (
        f"{OFFLOAD}mlp_norm {TE} cuda_graph_modules=attn",
        "offload_modules",
    ),
    "offloading parts of experts on a model without MoE layers": (
        f"{OFFLOAD}moe_act num_moe_experts=null",
        "offload_modules",
    ),
    "offloading `fused_group_mlp` of experts that are not fused": (
        f"{OFFLOAD}fused_group_mlp use_transformer_engine_op_fuser=false",
        "offload_modules",
    ),
    "offloading `fused_group_mlp` with `expert_fc1` or `moe_act`": (
        f"{OFFLOAD}fused_group_mlp,moe_act",
        "offload_modules",
    ),
    "offloading `expert_fc1` or `moe_act` of fused experts": (
        f"{OFFLOAD}expert_fc1 use_transformer_engine_op_fuser=true",
        "offload_modules",
    ),
    "offloading inside MoE layers with `moe_paged_stash`": (
        f"{OFFLOAD}fused_group_mlp moe_paged_stash=true",
        "model.moe_paged_stash",
    ),
    "offloading by megatron-core on Nemotron VL and Nemotron Omni": (
        nemotron(vision_cuda_graph_impl="none", fine_grained_activation_offloading=True, offload_modules=["core_attn"]),
        "fine_grained_activation_offloading",
    ),
    "offloading by megatron-core with `full_iteration` on a model that takes images": (
        offloading(
            vision_cuda_graph_impl="none",
            cuda_graph_impl="full_iteration",
            offload_modules=["mlp_norm"],
            fine_grained_offloading_max_inflight_offloads=1,
        ),
        "cuda_graph_impl",
    ),
}


def test_what_ranks_cannot_share_is_refused_with_the_least_that_works():
    with pytest.raises(OptionError, match="=1022: it must be a multiple of 4 with TP1xCP2. .* Write 1024."):
        graph_options(
            f"{TE} {PACKED} cuda_graph_packed_buckets=512,1022 tensor_model_parallel_size=1 context_parallel_size=2"
        )


def test_upstreams_graphs_of_mamba_layers_take_no_packs():
    with pytest.raises(OptionError, match="Mamba layers over unpacked|take no packed sequences"):
        graph_options(f"{TE} cuda_graph_modules=mamba hybrid_layer_pattern=M*M- dataset.enable_in_batch_packing=true")


def test_experts_beside_mamba_layers_get_the_parts_to_name():
    with pytest.raises(OptionError, match="Set cuda_graph_modules=attn,moe_router,mamba"):
        graph_options(f"{TE} {PACKED} num_moe_experts=8 expert_tensor_parallel_size=4 hybrid_layer_pattern=M*ME")


def test_experts_are_divided_like_layers_where_nothing_is_set():
    with pytest.raises(OptionError, match="expert_tensor_parallel_size=None: it must be 1 with"):
        graph_options(f"{TE} {PACKED} num_moe_experts=8 tensor_model_parallel_size=2")
    graph_options(f"{TE} {PACKED} num_moe_experts=8 tensor_model_parallel_size=2 expert_tensor_parallel_size=1")


def test_routers_of_whole_layers_take_no_jitter_either():
    with pytest.raises(OptionError, match="null with routers on graphs"):
        graph_options(f"{TE} {PACKED} num_moe_experts=8 moe_input_jitter_eps=0.1")


def test_every_combination_has_a_case():
    assert set(REFUSED) == {c.what for c in COMBINATIONS}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.what)
def test_refused_with_the_reason(combination):
    words, field = REFUSED[combination.what]
    with pytest.raises(OptionError, match=re.escape(combination.reason)) as caught:
        graph_options(words)
    assert caught.value.field == field
    assert "it must be" in str(caught.value)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.what)
def test_refused_by_one_check_alone(combination):
    """No case passes because of another combination that it happens to be as well."""
    options, written = normalize(REFUSED[combination.what][0])
    found = [c.what for c in COMBINATIONS if c.finds(options, facts_of(written))]
    assert found == [combination.what]


def test_in_batch_packing_is_refused_under_an_older_releases_name():
    with pytest.raises(OptionError, match="dataset.pack_sequences_in_batch=True: it must be false"):
        graph_options(f"{FULL} {VISION} dataset.pack_sequences_in_batch=true")


@pytest.mark.parametrize(
    "words", ["attention_dropout=much", "num_moe_experts=[8]", "variable_seq_lengths=often", "rng.te_rng_tracker=maybe"]
)
def test_settings_of_the_wrong_kind(words):
    with pytest.raises(OptionError, match=re.escape(words.split("=")[0].split(".")[-1])):
        graph_options(f"{TE} {words}")
