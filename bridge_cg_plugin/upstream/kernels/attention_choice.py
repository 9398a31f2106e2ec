"""By which kernels Transformer Engine attends when the encoder runs eager."""

import importlib
import os

import torch

from ..seams.registry.engine import TE_ATTENTION_UTILS

FUSED, FLASH, FLASH_2 = "NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"
FLASH_BACKWARD = "NVTE_FUSED_ATTN_USE_FAv2_BWD"
AMPERE, HOPPER = (8, 0), (9, 0)


def fused_attention_refusal() -> str | None:
    """Return why eager attends otherwise than by cuDNN's fused kernels in this process, None where it does not.

    The variables are the whole choice: megatron-core writes `attention_backend` into them when it builds a language
    model. Transformer Engine reads them whenever its attention parameters change.
    """
    if not _is_on(FUSED):
        return f"{FUSED}=0 or attention_backend keeps eager from cuDNN's attention"
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
        return "Transformer Engine does not attend by cuDNN's kernels on this GPU"
    if os.environ.get(FLASH_BACKWARD) == "1" and capability == HOPPER:
        return f"{FLASH_BACKWARD}=1 gives eager FlashAttention's backward"
    if capability < HOPPER and _is_on(FLASH) and _is_on(FLASH_2) and _has_flash_attention():
        return f"Transformer Engine prefers the installed package flash-attn on this GPU; {FLASH}=0 switches it off"
    return None


def _is_on(name: str) -> bool:
    return bool(int(os.environ.get(name, "1")))


def _has_flash_attention() -> bool:
    installed: bool = importlib.import_module(TE_ATTENTION_UTILS).FlashAttentionUtils.is_installed
    return installed
