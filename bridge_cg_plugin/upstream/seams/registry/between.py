"""Seams of what Qwen3-VL does between its encoder and its language model, where upstream's host waits."""

from ..seam import Feature, Seam
from .models import MODEL
from .training import RESTORED, STEPS

STEP = STEPS[0]
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
        patched_by="hooks.host_tokens",
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
        patched_by="hooks.between",
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
        patched_by="hooks.between",
    ),
)
