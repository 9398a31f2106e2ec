"""Seams of what Qwen3-VL does between its encoder and its language model, where upstream's host waits."""

from ..seam import Feature, patched, read
from .models import MODEL
from .training import QWEN3_VL_STEP

STEP = QWEN3_VL_STEP
STEP_PACKING = "0.6.2"  # the first release whose step has a packing of its own

SEAMS = (
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
