"""Seams of what Qwen3-VL does between its encoder and its language model, where upstream's host waits."""

from ..seam import Feature, Seam
from .models import MODEL
from .training import QWEN3_VL_STEP, RESTORED

STEP = QWEN3_VL_STEP
STEP_PACKING = "0.6.2"  # the first release whose step has a packing of its own

SEAMS = (
    Seam(
        name="step_padding",
        module=STEP,
        target="_pad_and_pack_qwen3_vl_step",
        kind="function",
        touch="extended",
        purpose="tokens are padded on the host as well, and a pack's offsets and longest sequence computed there",
        features=(Feature.BETWEEN,),
        undo=RESTORED,
        parameters=("tokens",),
        since=STEP_PACKING,
        patched_by="hooks.data.host_tokens",
    ),
    Seam(
        name="batch_of_model",
        module=MODEL,
        target="Qwen3VLModel.forward",
        kind="function",
        touch="read",
        purpose="the batch whose tokens, mask, grids and offsets are read before the encoder is launched",
        features=(Feature.BETWEEN,),
        parameters=("self", "input_ids", "attention_mask", "packed_seq_params", "image_grid_thw", "video_grid_thw"),
    ),
    Seam(
        name="image_tokens",
        module=MODEL,
        target="reorganize_inputs",
        kind="function",
        touch="extended",
        purpose="image features are put into their places, and deepstack's added, by indices that the host computed",
        features=(Feature.BETWEEN,),
        undo=RESTORED,
        parameters=("input_ids", "image_grid_thw", "video_grid_thw", "image_input_mask", "video_input_mask"),
        patched_by="hooks.data.between",
    ),
    Seam(
        name="deepstack_parts",
        module=MODEL,
        target="split_deepstack_embs",
        kind="function",
        touch="extended",
        purpose="the host counts the image features of each rank where it knows their places",
        features=(Feature.BETWEEN,),
        undo=RESTORED,
        parameters=("visual_pos_masks", "deepstack_visual_embeds"),
        patched_by="hooks.data.between",
    ),
    Seam(
        name="packed_rows",
        module=MODEL,
        target="preprocess_packed_seqs",
        kind="function",
        touch="extended",
        purpose="samples are packed by what the host knows of their padding",
        features=(Feature.BETWEEN,),
        undo=RESTORED,
        parameters=("input_ids", "attention_mask", "pre_process", "pg_collection"),
        uses=(
            "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size",
            "input_ids_rmpad = torch.zeros(shape, dtype=input_ids.dtype, device=input_ids.device)",
            "input_ids_rmpad[start_idx:start_idx + seqlen] = input_ids[i, attention_mask[i]]",
        ),
        patched_by="hooks.data.between",
    ),
    Seam(
        name="positions",
        module=MODEL,
        target="get_rope_index",
        kind="function",
        touch="extended",
        purpose="positions of a batch with images are computed on the host",
        features=(Feature.BETWEEN,),
        undo=RESTORED,
        parameters=("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask", "packed_seq_params"),
        patched_by="hooks.data.between",
    ),
    Seam(
        name="step_packing",
        module=STEP,
        target="forward_step",
        kind="function",
        touch="read",
        purpose="what the step packs keeps every token, padding included",
        features=(Feature.BETWEEN,),
        uses=(
            "original_tokens = tokens.clone()",
            "forward_args['input_ids'] = original_tokens",
            "attention_mask = torch.ones(original_tokens.shape[0], original_tokens.shape[1], dtype=torch.bool",
            "forward_args['attention_mask'] = attention_mask",
        ),
    ),
)
