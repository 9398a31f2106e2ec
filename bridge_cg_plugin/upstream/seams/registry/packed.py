"""Seams of packed-sequence graphs of the language model."""

from ..releases import RELEASES
from ..seam import Feature, Kind, called, patched, read, recorded, replayed, swapped
from .engine import CORE, TE_LAYERNORM_LINEAR, TE_LINEAR
from .models import BLOCK as QWEN_BLOCK
from .models import MODEL as QWEN_MODEL
from .training import TRAIN

GPT_STEP = "megatron.bridge.training.gpt_step"
GPT_PROVIDER = "megatron.bridge.models.gpt_provider"
# (module, class, first release that has it)
PROVIDERS = (
    (GPT_PROVIDER, "GPTModelProvider", RELEASES[-1].bridge),
    ("megatron.bridge.models.hybrid.hybrid_provider", "HybridModelProvider", "0.6.2"),
    ("megatron.bridge.models.mamba.mamba_provider", "MambaModelProvider", RELEASES[-1].bridge),
)
BLOCK = f"{CORE}.transformer.transformer_block"
ATTENTION = f"{CORE}.transformer.attention"
ROUTER = f"{CORE}.transformer.moe.router"
EXPERTS = f"{CORE}.transformer.moe.experts"
ROPE = f"{CORE}.models.common.embeddings.rope_utils"
CONSTRUCTOR_AND_FIELDS: tuple[tuple[str, str, Kind], ...] = (
    ("init", "__init__", "function"),
    ("fields", "__dataclass_fields__", "value"),
)
OPTIONS = "packed-sequence options can be set, overridden and saved with the model's configuration"

SEAMS = (
    patched(
        "packed_helper",
        f"{TRAIN}:TECudaGraphHelper",
        "the train loop drives the plugin's graphs of packed sequences where they are asked for",
        Feature.PACKED,
        "hooks.helpers.packed_helper",
        takes="model config seq_length micro_batch_size optimizers",
        has="create_cudagraphs graphs_created cuda_graph_set_manual_hooks delete_cuda_graphs",
    ),
    read(
        "packed_loop",
        f"{TRAIN}:train",
        "the loop makes the language model's helper, captures after warm-up and needs no more of it",
        Feature.PACKED,
        uses=(
            "TECudaGraphHelper(",
            "cuda_graph_helper.graphs_created()",
            "cuda_graph_helper.create_cudagraphs()",
        ),
    ),
    patched(
        "host_offsets",
        f"{GPT_STEP}:get_batch_from_iterator",
        "replays know how a batch is packed without waiting for the device",
        (Feature.PACKED_ATTENTION, Feature.PACKED_HYBRIDS),
        "hooks.data.batches",
        takes="data_iterator",
    ),
    replayed(
        "packed_decoder",
        f"{BLOCK}:TransformerBlock.forward",
        "the layers of a packed microbatch replay a graph",
        Feature.PACKED_ATTENTION,
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params",
    ),
    recorded(
        "packed_block",
        f"{BLOCK}:TransformerBlock",
        "a later pipeline stage takes its input from here, also while it is recorded",
        (Feature.PACKED_ATTENTION, Feature.PACKED_QWEN3_VL),
        has="layers pre_process input_tensor config",
    ),
    replayed(
        "packed_qwen3_vl_decoder",
        f"{QWEN_BLOCK}:Qwen3VLTransformerBlock.forward",
        "the layers of a packed microbatch of Qwen3-VL's language model replay a graph",
        Feature.PACKED_QWEN3_VL,
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params visual_pos_masks deepstack_visual_embeds",
        uses=("self._deepstack_process(hidden_states, visual_pos_masks, deepstack_visual_embeds[l_no])",),
    ),
    recorded(
        "packed_deepstack",
        f"{QWEN_BLOCK}:Qwen3VLTransformerBlock._deepstack_process",
        "image features are added to every token, zero where there are none, while work is recorded",
        Feature.PACKED_QWEN3_VL,
        takes="hidden_states visual_pos_masks visual_embeds",
    ),
    patched(
        "variable_lengths",
        f"{QWEN_MODEL}:Qwen3VLModel._expose_language_model_for_cuda_graph_helper",
        "a model that is told that lengths vary may have packed graphs, which take any length",
        Feature.PACKED_QWEN3_VL,
        "decoder.variable_lengths",
        takes="self",
        uses=("self.language_model.config.variable_seq_lengths",),
    ),
    read(
        "packed_layers",
        f"{CORE}.transformer.module:GraphableMegatronModule._should_call_te_cudagraph",
        "layers without graphs of megatron-core's own run their forward",
        Feature.PACKED,
        uses=("self.cuda_graphs",),
    ),
    read(
        "packed_attention",
        f"{ATTENTION}:SelfAttention",
        "the attention that was looked at for packed graphs",
        Feature.PACKED,
    ),
    replayed(
        "packed_norm",
        f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_pre_mlp_layernorm",
        "the norm before the experts is part of the router's graph",
        Feature.PACKED_EXPERTS,
        takes="hidden_states",
    ),
    replayed(
        "packed_router",
        f"{ROUTER}:TopKRouter.forward",
        "a router that leaves no trace replays a graph",
        Feature.PACKED_EXPERTS,
        takes="input padding_mask",
        uses=(
            "self.apply_input_jitter(input)",
            "self.gating(input)",
            "self.routing(logits, padding_mask=padding_mask)",
        ),
    ),
    replayed(
        "packed_gating",
        f"{ROUTER}:Router.gating",
        "of a router with losses or statistics the matrix product replays a graph",
        Feature.PACKED_EXPERTS,
        takes="input",
    ),
    called(
        "packed_masked_router",
        f"{ROUTER}:TopKRouter.routing",
        "a router's losses count the tokens that are no padding",
        Feature.PACKED_EXPERTS,
        takes="logits padding_mask",
        uses=("padding_mask.reshape(-1)", "self.apply_z_loss(logits, padding_mask=padding_mask)"),
    ),
    recorded(
        "packed_expert_bias",
        f"{ROUTER}:TopKRouter._apply_expert_bias",
        "tokens of each expert are counted without padding, while all layers are recorded",
        Feature.PACKED_EXPERTS,
        takes="routing_map padding_mask",
        uses=("self.local_tokens_per_expert += routing_map.sum(dim=0)",),
    ),
    called(
        "packed_router_metrics",
        f"{CORE}.transformer.moe.moe_logging:get_moe_metrics_tracker",
        "passes before a capture log no losses",
        Feature.PACKED_EXPERTS,
    ),
    read(
        "packed_route",
        f"{CORE}.transformer.moe.moe_layer:MoELayer.route",
        "the router is called once for what the norm gave",
        Feature.PACKED_EXPERTS,
        uses=("self.router",),
    ),
    recorded(
        "packed_experts",
        f"{CORE}.transformer.moe.moe_layer:MoELayer.forward",
        "experts get their tokens by counts that stay on the device, while all layers are recorded",
        Feature.PACKED_EXPERTS,
        takes="hidden_states",
        uses=(
            "self.shared_experts_compute(hidden_states)",
            "self.route(hidden_states, padding_mask)",
            "self.postprocess(output, shared_expert_output)",
        ),
    ),
    read(
        "packed_grouped_experts",
        f"{EXPERTS}:TEGroupedMLP.forward",
        "what experts compute, and where the router's probability is applied",
        Feature.PACKED_EXPERTS,
        takes="permuted_local_hidden_states tokens_per_expert permuted_probs",
        uses=("self.linear_fc1", "self.linear_fc2", "permuted_probs"),
    ),
    read(
        "packed_sequential_experts",
        f"{EXPERTS}:SequentialMLP.forward",
        "the same, where every expert is a module",
        Feature.PACKED_EXPERTS,
        uses=("self.local_experts",),
    ),
    called(
        "packed_swiglu",
        f"{CORE}.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl",
        "the function between an expert's linear layers",
        Feature.PACKED_EXPERTS,
        takes="input bias weights fp8_input_store",
    ),
    called(
        "packed_quick_geglu",
        f"{CORE}.fusions.fused_bias_geglu:weighted_bias_quick_geglu_impl",
        "the same, gated by quick GELU",
        Feature.PACKED_EXPERTS,
        takes="input bias weights fp8_input_store linear_offset clamp_value",
    ),
    called(
        "packed_fp8_context",
        f"{CORE}.fp8_utils:get_fp8_context",
        "a part of a layer is recorded in the layer's precision",
        Feature.PACKED_FP8,
        takes="config layer_no",
    ),
    read(
        "packed_fp8_block",
        f"{BLOCK}:TransformerBlock.forward",
        "delayed scaling surrounds all layers, other recipes each layer",
        Feature.PACKED_FP8,
        uses=("self.config.fp8_recipe == Fp8Recipe.delayed", "get_fp8_context(self.config, layer.layer_number - 1)"),
    ),
    swapped(
        "packed_fp8_state",
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager",
        "a flag on the device says whether weights changed, and delayed scales are updated after replays",
        Feature.PACKED_FP8,
        has="is_fp8_enabled reduce_and_update_fp8_tensors",
    ),
    *(
        read(
            f"packed_fp8_{name}",
            f"{module}:{target}.forward",
            "a captured product reads the flag, and writes the quantized weight that eager keeps",
            Feature.PACKED_FP8,
            kind="function",
            takes="is_first_microbatch",
            uses=(
                (
                    "FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor",
                    "FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()",
                ),
            ),
        )
        for name, module, target in (
            ("linear", TE_LINEAR, "Linear"),
            ("layernorm_linear", TE_LAYERNORM_LINEAR, "LayerNormLinear"),
        )
    ),
    read(
        "packed_fp8_copies",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule",
        "where a module keeps its quantized weights and its scales",
        Feature.PACKED_FP8,
        has="_fp8_workspaces fp8_meta quantizers",
    ),
    read(
        "packed_fp8_gathered",
        f"{CORE}.fp8_utils:post_all_gather_processing",
        "after an optimizer's step data parallelism makes what a backward reads of parameters in fp8",
        Feature.PACKED_FP8,
        uses=("te_post_all_gather_processing(",),
    ),
    *(
        read(
            f"packed_fp8_{name}",
            f"transformer_engine.pytorch.tensor.storage.{module}:{target}",
            "what a backward reads of a parameter in fp8 is made where it was before",
            Feature.PACKED_FP8,
            kind="function",
            uses=(uses,),
        )
        for name, module, target, uses in (
            ("transpose", "float8_tensor_storage", "Float8TensorStorage._create_transpose", "out=self._transpose"),
            (
                "columns",
                "float8_blockwise_tensor_storage",
                "Float8BlockwiseQTensorStorage._create_columnwise",
                "out=self._columnwise_data",
            ),
        )
    ),
    read(
        "packed_fp8_microbatches",
        f"{CORE}.transformer.module:MegatronModule.set_is_first_microbatch",
        "the first microbatch of a step quantizes weights",
        Feature.PACKED_FP8,
        uses=("m.is_first_microbatch = True",),
    ),
    swapped(
        "packed_rotary",
        f"{ATTENTION}:apply_rotary_pos_emb",
        "tokens are rotated by angles of their own, where upstream reads the offsets on the host",
        Feature.PACKED,
        takes="t freqs config cu_seqlens mscale cp_group",
    ),
    read(
        "packed_rotary_positions",
        f"{ROPE}:_apply_rotary_pos_emb_thd",
        "which positions upstream gives the tokens of a pack",
        Feature.PACKED,
        takes="t cu_seqlens freqs",
        uses=("freqs.size(0) == ", "_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs)"),
    ),
    called(
        "packed_files",
        "megatron.bridge.utils.safe_pickle:safe_load_npy",
        "the planner reads Bridge's packed files",
        Feature.PLANNER,
    ),
    *(
        patched(
            f"{provider}.{name}",
            f"{module}:{provider}.{target}",
            OPTIONS,
            Feature.OPTIONS,
            "hooks.configuration.provider_fields",
            kind=kind,
            models=(provider,),
            since=since,
        )
        for module, provider, since in PROVIDERS
        for name, target, kind in CONSTRUCTOR_AND_FIELDS
    ),
)


STACK = f"{CORE}.models.hybrid.hybrid_block"
MAMBA = f"{CORE}.ssm"

HYBRID_SEAMS = (
    replayed(
        "hybrid_decoder",
        f"{STACK}:HybridStack.forward",
        "the layers of a packed microbatch of a hybrid replay a graph",
        Feature.PACKED_HYBRIDS,
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params",
    ),
    recorded(
        "hybrid_block",
        f"{STACK}:HybridStack",
        "a later pipeline stage takes its input from here, also while it is recorded",
        Feature.PACKED_HYBRIDS,
        has="layers pre_process input_tensor pg_collection",
    ),
    replayed(
        "mamba_layer",
        f"{MAMBA}.mamba_layer:MambaLayer.forward",
        "a Mamba layer of a packed microbatch replays a graph",
        Feature.PACKED_HYBRIDS,
        takes="hidden_states packed_seq_params",
        uses=("self.mixer(",),
    ),
    read(
        "mamba_mixer",
        f"{MAMBA}.mamba_mixer:MambaMixer._ssm_training",
        "a state stays in its document by every token's number alone; parameters come from the mixer's helper",
        Feature.PACKED_HYBRIDS,
        takes="zxBCdt packed_seq_params",
        uses=(
            "packed_seq_params.seq_idx",
            *(f"self.cp.get_{name}()" for name in ("A_log", "conv1d_weight", "conv1d_bias", "dt_bias", "D")),
        ),
    ),
    recorded(
        "mamba_parameters",
        f"{MAMBA}.mamba_context_parallel:MambaContextParallel",
        "the mixer computes with what stands in for its parameters while work is recorded",
        Feature.PACKED_HYBRIDS,
        has="dt_bias_cp1 A_log_cp1 D_cp1",
    ),
    patched(
        "pack_indices",
        f"{CORE}.packed_seq_params:PackedSeqParams.__post_init__",
        "where packs are on graphs, a step finds every token's document without waiting for the device",
        Feature.PACKED_HYBRIDS,
        "hooks.data.pack_indices",
        uses=("self.total_tokens", "self.seq_idx", "repeat_interleave"),
    ),
)
