"""Qwen2.5-VL: Hugging Face's tower, most layers of which attend inside windows."""

import torch
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from tests.gpu.tower_case import (
    IMAGE,
    PATCH_BUCKETS,
    SIZES,
    START,
    WIDTH,
    Tower,
    image_tokens,
    language_model,
    one_or_two,
    patch_inputs,
)

PATCH = 3 * 2 * 14 * 14
DEPTH = 6
WINDOWED = {
    "depth": DEPTH,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [2, DEPTH - 1],
}


def provider() -> Qwen25VLModelProvider:
    """Return the provider of the model."""
    return Qwen25VLModelProvider(
        **language_model(),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        vision_config=Qwen2_5_VLVisionConfig(**WINDOWED),
    )


TOWER = Tower(provider, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, patch_inputs(PATCH))
