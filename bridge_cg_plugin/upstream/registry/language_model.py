"""Seams of language-model graphs: per-layer inputs and the length of sequences."""

from ..seams import Seam
from .engine import LAYER
from .training import RESTORED, STEPS

STEP = STEPS[0]

SEAMS = (
    Seam(
        name="language_model_rotary",
        module=LAYER,
        target="TransformerLayer.get_layer_static_inputs",
        kind="function",
        touch="extended",
        purpose="per-layer graphs of a model with multimodal rotary embedding contain it",
        undo=RESTORED,
        parameters=("self", "seq_length", "micro_batch_size"),
        patched_by="language_model",
    ),
    Seam(
        name="language_model_length",
        module=STEP,
        target="get_batch",
        kind="function",
        touch="extended",
        purpose="sequences have the one length that language-model graphs replay",
        undo=RESTORED,
        parameters=("data_iterator", "cfg"),
        patched_by="language_model",
    ),
    *(
        Seam(
            name=f"language_model_length.{target.rpartition('_to_')[0]}",
            module=STEP,
            target=target,
            kind="function",
            touch="called",
            purpose="pads one tensor of a batch to that length",
            parameters=("target_len", "max_cap"),
        )
        for target in ("pad_or_truncate_2d_to_len", "pad_or_truncate_attn_to_len", "pad_or_truncate_pos_to_len")
    ),
)
