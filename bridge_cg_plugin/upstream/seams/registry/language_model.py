"""Seams of language-model graphs: per-layer inputs and the length of sequences."""

from ..seam import Feature, called, patched, read, recorded, touched
from .engine import CORE, LAYER
from .models import ATTENTION, BLOCK, MODELLING, QWEN3_VL
from .training import QWEN3_VL_STEP

STEP = QWEN3_VL_STEP
FULL_ITERATION = f"{CORE}.full_cuda_graph"
LANGUAGE_MODEL = f"{MODELLING}.text_model"

SEAMS = (
    patched(
        "language_model_rotary",
        f"{LAYER}:TransformerLayer.get_layer_static_inputs",
        "per-layer graphs of a model with multimodal rotary embedding contain it",
        Feature.MULTIMODAL_ROTARY,
        "decoder.per_layer_graphs",
        takes="self seq_length micro_batch_size",
    ),
    patched(
        "language_model_length",
        f"{STEP}:get_batch",
        "sequences have the one length that language-model graphs replay",
        (Feature.LANGUAGE_MODEL, Feature.FULL_ITERATION),
        "decoder.per_layer_graphs",
        takes="data_iterator cfg",
        models=QWEN3_VL,
    ),
    *(
        called(
            f"language_model_length.{target.rpartition('_to_')[0]}",
            f"{STEP}:{target}",
            "pads one tensor of a batch to that length",
            (Feature.LANGUAGE_MODEL, Feature.FULL_ITERATION),
            kind="function",
            takes="target_len max_cap",
            models=QWEN3_VL,
        )
        for target in ("pad_or_truncate_2d_to_len", "pad_or_truncate_attn_to_len", "pad_or_truncate_pos_to_len")
    ),
    patched(
        "full_iteration",
        f"{FULL_ITERATION}:FullCudaGraphWrapper.__call__",
        "a step of a model that takes images runs eager, its language model on graphs",
        Feature.FULL_ITERATION,
        "hooks.helpers.full_iteration",
        takes="self",
        uses=("self.forward_backward_func(*args, **kwargs)", "kwargs['forward_only']", "kwargs['num_microbatches']"),
    ),
    read(
        "full_iteration_wrapper",
        f"{FULL_ITERATION}:FullCudaGraphWrapper",
        "the schedule that the wrapper holds, and its warm-up steps",
        Feature.FULL_ITERATION,
        takes="forward_backward_func cuda_graph_warmup_steps",
        has="forward_backward_func cuda_graph_warmup_steps",
    ),
    touched(
        "instance",
        "language_model_forward",
        f"{LANGUAGE_MODEL}:Qwen3VLGPTModel.forward",
        "a microbatch's language model replays a graph",
        Feature.FULL_ITERATION,
        undo="the end of training and deactivate() take the instance's own forward off",
        takes="decoder_input position_ids labels visual_pos_masks deepstack_visual_embeds",
    ),
    patched(
        "language_model_offload",
        f"{LANGUAGE_MODEL}:Qwen3VLGPTModel.forward",
        "megatron-core's activation offloading is told that a microbatch begins, as in GPTModel.forward",
        Feature.CORE_OFFLOAD,
        "decoder.offload",
        takes="self",
        models=QWEN3_VL,
    ),
    patched(
        "attention_offload",
        f"{ATTENTION}:Qwen3VLSelfAttention.forward",
        "megatron-core's activation offloading reaches the language model's attention, as in its own",
        Feature.CORE_OFFLOAD,
        "decoder.offload",
        takes="self hidden_states",
        models=QWEN3_VL,
        uses=("self.get_query_key_value_tensors(", "self.core_attention(query, key, value,", "self.linear_proj("),
    ),
    touched(
        "declared",
        "attention_offload_steps",
        f"{CORE}.transformer.attention:Attention.forward",
        "which steps of attention megatron-core offloads, and what gives its memory back then",
        Feature.CORE_OFFLOAD,
        models=QWEN3_VL,
        uses=(
            "off_interface(self.offload_qkv_linear, hidden_states, 'qkv_linear')",
            "off_interface(self.offload_core_attention and self.training, query, 'core_attn')",
            "forced_released_tensors=[query, key, value]",
            "off_interface(self.offload_attn_proj, core_attn_out, 'attn_proj')",
            "forced_released_tensors=[core_attn_out]",
        ),
    ),
    read(
        "language_model_parts",
        f"{LANGUAGE_MODEL}:Qwen3VLGPTModel",
        "the modules whose parameters the language model's region owns",
        Feature.FULL_ITERATION,
        has="decoder embedding output_layer share_embeddings_and_output_weights",
    ),
    recorded(
        "deepstack_addition",
        f"{BLOCK}:Qwen3VLTransformerBlock._deepstack_process",
        "features of images are added as dense tensors while work is recorded",
        Feature.FULL_ITERATION,
        takes="hidden_states visual_pos_masks visual_embeds",
    ),
    called(
        "random_states",
        f"{CORE}.tensor_parallel.random:get_all_rng_states",
        "a capture knows the generators that dropout draws from",
        (Feature.PACKED, Feature.FULL_ITERATION, Feature.VISION_QWEN3_VL),
    ),
    recorded(
        "random_state_forks",
        f"{CORE}.tensor_parallel.random:CudaRNGStatesTracker.fork",
        "recorded work that draws nothing runs where random states are none that a graph can use",
        (Feature.PACKED, Feature.VISION_QWEN3_VL),
        takes="name",
    ),
    called(
        "random_state_tracker",
        f"{CORE}.tensor_parallel.random:get_cuda_rng_tracker",
        "the tracker that a decoder's layers fork",
        (Feature.PACKED, Feature.VISION_QWEN3_VL),
    ),
)
