"""Qwen3-Omni: Hugging Face's tower, which computes what Qwen3-VL's does."""

from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import IMAGES, Encoder, patches_batch, peaked


def build_qwen3_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen3-Omni-30B (27 layers), whose language model has a width of 2048."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    torch.manual_seed(0)
    indexes = [8, 16, 24] if layers >= 25 else [0, layers // 2]
    sizes: dict[str, Any] = {"out_hidden_size": 2048}
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24}
    config = Qwen3OmniMoeVisionEncoderConfig(depth=layers, deepstack_visual_indexes=indexes, **sizes)
    return peaked(Qwen3OmniMoeVisionEncoder._from_config(config), ("qkv.weight",))


ENCODER = Encoder(
    27,
    build_qwen3_omni,
    patches_batch,
    lambda returned: [returned.pooler_output, *returned.deepstack_features],
    IMAGES,
)
