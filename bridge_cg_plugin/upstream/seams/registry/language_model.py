"""Seams of language-model graphs: per-layer inputs and the length of sequences."""

from ..seam import Feature, called, patched, read, recorded, touched
from .engine import CORE, LAYER
from .models import ATTENTION, BLOCK, MODEL, MODELLING, QWEN3_VL
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


STEP_PACKING = "0.6.2"  # the first release whose step has a packing of its own

BETWEEN_SEAMS = (
    patched(
        "step_padding",
        f"{STEP}:_pad_and_pack_qwen3_vl_step",
        "tokens are padded on the host as well, and a pack's offsets and longest sequence computed there",
        Feature.BETWEEN,
        "hooks.data.host_tokens",
        takes="tokens",
        since=STEP_PACKING,
    ),
    read(
        "batch_of_model",
        f"{MODEL}:Qwen3VLModel.forward",
        "the batch whose tokens, mask, grids and offsets are read before the encoder is launched",
        Feature.BETWEEN,
        takes="self input_ids attention_mask packed_seq_params image_grid_thw video_grid_thw",
    ),
    patched(
        "image_tokens",
        f"{MODEL}:reorganize_inputs",
        "image features are put into their places, and deepstack's added, by indices that the host computed",
        Feature.BETWEEN,
        "hooks.data.between",
        takes="input_ids image_grid_thw video_grid_thw image_input_mask video_input_mask",
    ),
    patched(
        "deepstack_parts",
        f"{MODEL}:split_deepstack_embs",
        "the host counts the image features of each rank where it knows their places",
        Feature.BETWEEN,
        "hooks.data.between",
        takes="visual_pos_masks deepstack_visual_embeds",
    ),
    patched(
        "packed_rows",
        f"{MODEL}:preprocess_packed_seqs",
        "samples are packed by what the host knows of their padding",
        Feature.BETWEEN,
        "hooks.data.between",
        takes="input_ids attention_mask pre_process pg_collection",
        uses=(
            "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size",
            "input_ids_rmpad = torch.zeros(shape, dtype=input_ids.dtype, device=input_ids.device)",
            "input_ids_rmpad[start_idx:start_idx + seqlen] = input_ids[i, attention_mask[i]]",
        ),
    ),
    patched(
        "positions",
        f"{MODEL}:get_rope_index",
        "positions of a batch with images are computed on the host",
        Feature.BETWEEN,
        "hooks.data.between",
        takes="input_ids image_grid_thw video_grid_thw attention_mask packed_seq_params",
    ),
    read(
        "step_packing",
        f"{STEP}:forward_step",
        "what the step packs keeps every token, padding included",
        Feature.BETWEEN,
        uses=(
            "original_tokens = tokens.clone()",
            "forward_args['input_ids'] = original_tokens",
            "attention_mask = torch.ones(original_tokens.shape[0], original_tokens.shape[1], dtype=torch.bool",
            "forward_args['attention_mask'] = attention_mask",
        ),
    ),
)


TE_OFFLOAD = "transformer_engine.pytorch.cpu_offload"
GPT_MODEL = f"{CORE}.models.gpt.gpt_model"
CORE_OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"

CORE_OFFLOAD_SEAMS = (
    read(
        "weights_stay",
        f"{TE_OFFLOAD}:NVTE_CPU_OFFLOAD_V1",
        "whether Transformer Engine leaves weights on the device while megatron-core offloads",
        Feature.CORE_OFFLOAD,
        kind="value",
    ),
    read(
        "offload_marks",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.tensor_need_offloading_checker",
        "a tensor marked with never_offload stays on the device in megatron-core's offloading, too",
        Feature.CORE_OFFLOAD,
        takes="self tensor",
    ),
    patched(
        "offloaded_microbatch_ends",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.finish_all_groups",
        "a microbatch is not over before its last group, whichever groups stay on the device",
        Feature.CORE_OFFLOAD,
        "decoder.offloaded_groups",
        takes="self name",
    ),
    patched(
        "offloaded_memory",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.bulk_offload",
        "memory that is given back is not that of saved tensors that stay",
        Feature.CORE_OFFLOAD,
        "decoder.offloaded_groups",
        takes="self forced_released_tensors",
        uses=(("self.should_bulk_offload(group_to_offload)", "self.should_bulk_offload()"),),
    ),
    read(
        "offloaded_microbatch",
        f"{CORE_OFFLOAD}:ChunkOffloadHandler",
        "groups of a microbatch: which are yet to leave and what each saved",
        Feature.CORE_OFFLOAD,
        has="_groups_to_offload offload_groups _offloaded_group_index "
        "find_next_group should_bulk_offload tensor_need_offloading_checker",
    ),
    read(
        "offloaded_backwards",
        f"{CORE_OFFLOAD}:PipelineOffloadManager",
        "which microbatches' backward has begun",
        Feature.CORE_OFFLOAD,
        has="get_instance _cached_chunks_backward _cached_chunks_index_backward",
    ),
    called(
        "offload_groups",
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface",
        "a step of attention is a group that megatron-core offloads",
        Feature.CORE_OFFLOAD,
        takes="offload tensor name",
        models=QWEN3_VL,
    ),
    called(
        "offload_group_ends",
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface.group_offload",
        "a group is offloaded once its step ended",
        Feature.CORE_OFFLOAD,
        takes="tensor forced_released_tensors",
        formerly=("FineGrainedActivationOffloadingInterface.group_commit",),
        models=QWEN3_VL,
    ),
    called(
        "offload_begins",
        f"{GPT_MODEL}:GPTModel.preprocess_for_fine_grained_offloading",
        "megatron-core's offloading is told that a microbatch of a language model begins",
        Feature.CORE_OFFLOAD,
        takes="self",
        models=QWEN3_VL,
    ),
)
