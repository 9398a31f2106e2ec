"""Seams of Qwen3-VL's language model: its graphs, its batches and megatron-core's offloading."""

from ..encoders import QWEN3_VL
from ..seam import Feature as F
from ..seam import called, patched, read, replayed, seams_of, swapped
from .engine import CORE, TRANSFORMER_LAYER
from .models import ATTENTION, BLOCK, MODEL, MODELLING
from .training import QWEN3_VL_STEP

STEP = QWEN3_VL_STEP
FULL_GRAPH = f"{CORE}.full_cuda_graph:FullCudaGraphWrapper"
LANGUAGE_MODEL = f"{MODELLING}.text_model:Qwen3VLGPTModel"
RANDOM = f"{CORE}.tensor_parallel.random"
CORE_OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"

_BETWEEN = seams_of(
    F.BETWEEN,
    step_padding=patched(
        f"{STEP}:_pad_and_pack_qwen3_vl_step(tokens)",
        "tokens are padded on the host as well, and a pack's offsets and longest sequence computed there",
        since="0.6.2",
    ),
    batch_of_model=read(
        f"{MODEL}:Qwen3VLModel.forward",
        "the batch whose tokens, mask, grids and offsets are read before the encoder is launched",
        takes="self input_ids attention_mask packed_seq_params image_grid_thw video_grid_thw",
    ),
    image_tokens=patched(
        f"{MODEL}:reorganize_inputs(input_ids, image_grid_thw, video_grid_thw, image_input_mask, video_input_mask)",
        "image features are put into their places, and deepstack's added, by indices that the host computed",
    ),
    deepstack_parts=patched(
        f"{MODEL}:split_deepstack_embs(visual_pos_masks, deepstack_visual_embeds)",
        "the host counts the image features of each rank where it knows their places",
    ),
    packed_rows=patched(
        f"{MODEL}:preprocess_packed_seqs(input_ids, attention_mask, pre_process, pg_collection)",
        "samples are packed by what the host knows of their padding",
        "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size",
        "input_ids_rmpad = torch.zeros(shape, dtype=input_ids.dtype, device=input_ids.device)",
        "input_ids_rmpad[start_idx:start_idx + seqlen] = input_ids[i, attention_mask[i]]",
    ),
    positions=patched(
        f"{MODEL}:get_rope_index(input_ids, image_grid_thw, video_grid_thw, attention_mask, packed_seq_params)",
        "positions of a batch with images are computed on the host",
    ),
    step_packing=read(
        f"{STEP}:forward_step",
        "what the step packs keeps every token, padding included",
        *("original_tokens = tokens.clone()", "forward_args['input_ids'] = original_tokens"),
        "attention_mask = torch.ones(original_tokens.shape[0], original_tokens.shape[1], dtype=torch.bool",
        "forward_args['attention_mask'] = attention_mask",
    ),
)
_ROTARY = seams_of(
    F.MULTIMODAL_ROTARY,
    language_model_rotary=patched(
        f"{TRANSFORMER_LAYER}.get_layer_static_inputs(self, seq_length, micro_batch_size)",
        "per-layer graphs of a model with multimodal rotary embedding contain it",
    ),
)
_LENGTH = seams_of(
    (F.LANGUAGE_MODEL, F.FULL_ITERATION),
    QWEN3_VL,
    language_model_length=patched(
        f"{STEP}:get_batch(data_iterator, cfg)", "sequences have the one length that language-model graphs replay"
    ),
    **{
        f"language_model_length.{name}": called(
            f"{STEP}:{name}_to_len(target_len, max_cap)", "pads one tensor of a batch to that length"
        )
        for name in ("pad_or_truncate_2d", "pad_or_truncate_attn", "pad_or_truncate_pos")
    },
)
_FULL_ITERATION = seams_of(
    F.FULL_ITERATION,
    full_iteration=patched(
        f"{FULL_GRAPH}.__call__(self)",
        "a step of a model that takes images runs eager, its language model on graphs",
        *("self.forward_backward_func(*args, **kwargs)", "kwargs['forward_only']", "kwargs['num_microbatches']"),
    ),
    full_iteration_wrapper=read(
        f"{FULL_GRAPH}(forward_backward_func, cuda_graph_warmup_steps)[forward_backward_func, cuda_graph_warmup_steps]",
        "the schedule that the wrapper holds, and its warm-up steps",
    ),
    language_model_forward=replayed(
        f"{LANGUAGE_MODEL}.forward(decoder_input, position_ids, labels, visual_pos_masks, deepstack_visual_embeds)",
        "a microbatch's language model replays a graph",
    ),
    language_model_parts=read(
        f"{LANGUAGE_MODEL}[decoder, embedding, output_layer, share_embeddings_and_output_weights]",
        "the modules whose parameters the language model's region owns",
    ),
    deepstack_addition=swapped(
        f"{BLOCK}:Qwen3VLTransformerBlock._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)",
        "features of images are added as dense tensors while work is recorded",
    ),
)
_OFFLOAD_QWEN3_VL = seams_of(
    F.CORE_OFFLOAD,
    QWEN3_VL,
    language_model_offload=patched(
        f"{LANGUAGE_MODEL}.forward(self)",
        "megatron-core's activation offloading is told that a microbatch begins, as in GPTModel.forward",
    ),
    attention_offload=patched(
        f"{ATTENTION}:Qwen3VLSelfAttention.forward(self, hidden_states)",
        "megatron-core's activation offloading reaches the language model's attention, as in its own",
        *("self.get_query_key_value_tensors(", "self.core_attention(query, key, value,", "self.linear_proj("),
    ),
    attention_offload_steps=read(
        f"{CORE}.transformer.attention:Attention.forward",
        "which steps of attention megatron-core offloads, and what gives its memory back then",
        "off_interface(self.offload_qkv_linear, hidden_states, 'qkv_linear')",
        "off_interface(self.offload_core_attention and self.training, query, 'core_attn')",
        "forced_released_tensors=[query, key, value]",
        "off_interface(self.offload_attn_proj, core_attn_out, 'attn_proj')",
        "forced_released_tensors=[core_attn_out]",
    ),
    offload_groups=called(
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface(offload, tensor, name)",
        "a step of attention is a group that megatron-core offloads",
    ),
    offload_group_ends=called(
        f"{CORE_OFFLOAD}:FineGrainedActivationOffloadingInterface.group_offload(tensor, forced_released_tensors)",
        "a group is offloaded once its step ended",
        formerly=("FineGrainedActivationOffloadingInterface.group_commit",),
    ),
    offload_begins=called(
        f"{CORE}.models.gpt.gpt_model:GPTModel.preprocess_for_fine_grained_offloading(self)",
        "megatron-core's offloading is told that a microbatch of a language model begins",
    ),
)
_STATES = seams_of(
    (F.PACKED, F.FULL_ITERATION, F.VISION_QWEN3_VL),
    random_states=called(f"{RANDOM}:get_all_rng_states", "a capture knows the generators that dropout draws from"),
)
_FORKS = seams_of(
    (F.PACKED, F.VISION_QWEN3_VL),
    random_state_forks=swapped(
        f"{RANDOM}:CudaRNGStatesTracker.fork(name)",
        "recorded work that draws nothing runs where random states are none that a graph can use",
    ),
    random_state_tracker=called(f"{RANDOM}:get_cuda_rng_tracker", "the tracker that a decoder's layers fork"),
)
_OFFLOAD = seams_of(
    F.CORE_OFFLOAD,
    offload_marks=read(
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.tensor_need_offloading_checker(self, tensor)",
        "a tensor marked with never_offload stays on the device in megatron-core's offloading, too",
    ),
    offloaded_microbatch_ends=patched(
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.finish_all_groups(self, name)",
        "a microbatch is not over before its last group, whichever groups stay on the device",
    ),
    offloaded_memory=patched(
        f"{CORE_OFFLOAD}:ChunkOffloadHandler.bulk_offload(self, forced_released_tensors)",
        "memory that is given back is not that of saved tensors that stay",
        ("self.should_bulk_offload(group_to_offload)", "self.should_bulk_offload()"),
    ),
    offloaded_microbatch=read(
        f"{CORE_OFFLOAD}:ChunkOffloadHandler",
        "groups of a microbatch: which are yet to leave and what each saved",
        has="_groups_to_offload offload_groups _offloaded_group_index "
        "find_next_group should_bulk_offload tensor_need_offloading_checker",
    ),
    offloaded_backwards=read(
        f"{CORE_OFFLOAD}:PipelineOffloadManager[get_instance, _cached_chunks_backward, _cached_chunks_index_backward]",
        "which microbatches' backward has begun",
    ),
)
SEAMS = (*(*_BETWEEN, *_ROTARY, *_LENGTH, *_FULL_ITERATION, *_OFFLOAD_QWEN3_VL, *_STATES, *_FORKS, *_OFFLOAD),)
