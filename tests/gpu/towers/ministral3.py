"""Ministral 3: Hugging Face's Pixtral, images padded to one size."""

import torch
from megatron.bridge.models.ministral3.ministral3_provider import Ministral3ModelProvider
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch import Tensor
from transformers import Mistral3Config

from tests.gpu.tower_case import (
    HEADS,
    IMAGE,
    LAYERS,
    PATCH_BUCKETS,
    SEQUENCE,
    SIZES,
    WIDTH,
    Inputs,
    Tower,
    image_tokens,
    language_model,
    one_or_two,
)

PATCH = 14


def provider() -> Ministral3ModelProvider:
    """Return the provider of the model, its tower as Mistral 3's default configuration has it."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": SEQUENCE,
    }
    text = {"model_type": "ministral3", "hidden_size": WIDTH, "num_attention_heads": HEADS, "rope_parameters": rope}
    config = Mistral3Config(text_config=text)
    config.vision_config.num_hidden_layers = LAYERS
    return Ministral3ModelProvider(**language_model(), image_token_id=IMAGE, hf_config=config)


def inputs(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images padded to one size."""
    sizes = torch.tensor(images) * PATCH
    pixels = torch.randn(len(images), 3, *sizes.amax(0).tolist(), generator=generator)
    return {"visual_inputs": GenericVisualInputs(pixel_values=pixels, image_sizes=sizes)}


TOWER = Tower(provider, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, inputs)
