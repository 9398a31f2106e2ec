"""Qwen2.5-Omni: Hugging Face's tower, Qwen2.5-VL's with three projections in attention."""

import torch
from torch import nn

from tests.models.encoder_case import IMAGES, RMSNORM_STD, Encoder, patches_batch, peaked
from tests.models.encoders.qwen25_vl import windowed


def build_qwen25_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-Omni in the sizes of Qwen2.5-VL-7B's (32 layers)."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

    torch.manual_seed(0)
    config = Qwen2_5OmniVisionEncoderConfig(**windowed(layers))
    return peaked(Qwen2_5OmniVisionEncoder._from_config(config), ("attn.q.weight", "attn.k.weight"), RMSNORM_STD)


ENCODER = Encoder(
    32,
    build_qwen25_omni,
    patches_batch,
    lambda returned: [returned.pooler_output],
    IMAGES,
    noise=("attn.k.bias",),  # softmax does not change with it
)
