"""Qwen2.5-VL: Hugging Face's tower, most layers of which attend inside windows."""

from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import RMSNORM_STD, Encoder, patches_batch, peaked
from tests.models.workloads import CASES


def build_qwen25_vl(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-VL-7B (32 layers, 676 M parameters)."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(**windowed(layers))
    # As Bridge's model makes it, which takes PyTorch's scaled_dot_product_attention.
    return peaked(Qwen2_5_VisionTransformerPretrainedModel._from_config(config), ("qkv.weight",), RMSNORM_STD)


def windowed(layers: int) -> dict[str, Any]:
    """Return the sizes of Qwen2.5-VL-7B's tower."""
    full = [index for index in (7, 15, 23, 31) if index < layers] or [1, layers - 1]
    sizes = {"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24}
    return {"depth": layers, "fullatt_block_indexes": full, **sizes}


ENCODER = Encoder(
    32,
    build_qwen25_vl,
    patches_batch,
    lambda returned: [returned.pooler_output],
    {name: CASES[name] for name in ("1x448", "1x768", "8mix", "video16")},
)
