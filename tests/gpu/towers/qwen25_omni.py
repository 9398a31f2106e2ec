"""Qwen2.5-Omni, its vision: Hugging Face's tower, Qwen2.5-VL's with three projections in attention."""

import torch
from megatron.bridge.models.qwen_omni.qwen25_omni_provider import Qwen25OmniModelProvider
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

from tests.gpu.tower_case import (
    END,
    IMAGE,
    LAYERS,
    PATCH_BUCKETS,
    SEQUENCE,
    SIZES,
    START,
    WIDTH,
    Inputs,
    Tower,
    image_tokens,
    language_model,
    one_or_two,
    patch_inputs,
)

from .qwen25_vl import PATCH, WINDOWED

# No sample has sounds: their tower is small, and frozen, because gradients of all that trains are waited for.
AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 256, "d_model": 256}


def provider() -> Qwen25OmniModelProvider:
    """Return the provider of the model."""
    vision = {**WINDOWED, "depth": LAYERS, "fullatt_block_indexes": [1, LAYERS - 1]}
    return Qwen25OmniModelProvider(
        **language_model(),
        language_max_sequence_length=SEQUENCE,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        freeze_audio_model=True,
        thinker_config=Qwen2_5OmniThinkerConfig(vision_config=vision, audio_config={**AUDIO, "output_dim": WIDTH}),
    )


def inputs(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images; the model finds positions itself."""
    return {**patch_inputs(PATCH)(images, tokens, generator), "position_ids": None}


TOWER = Tower(provider, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, inputs)
