"""Seams of what Bridge's Qwen3-VL does between its encoder and its language model, where the host waits for the device."""

from ..seam import Feature, Seam
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
)
