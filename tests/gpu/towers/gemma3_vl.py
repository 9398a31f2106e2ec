"""Gemma 3: Hugging Face's SigLIP, images of one size."""

import torch
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.gemma_vl.modeling_gemma3_vl import Gemma3VLMultimodalProjectorConfig
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch import Tensor
from transformers import SiglipVisionConfig

from tests.gpu.tower_case import IMAGE, START, WIDTH, Inputs, Tower, language_model, one_or_two

DEPTH, TOWER_WIDTH = 6, 1152
SIDE, EMBEDDINGS, PATCHES = 896, 256, 4096


def provider() -> Gemma3VLModelProvider:
    """Return the provider of the model."""
    return Gemma3VLModelProvider(
        **language_model(),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_config=SiglipVisionConfig(
            num_hidden_layers=DEPTH,
            hidden_size=TOWER_WIDTH,
            num_attention_heads=16,
            intermediate_size=4304,
            image_size=SIDE,
            patch_size=14,
        ),
        vision_projector_config=Gemma3VLMultimodalProjectorConfig(
            input_size=TOWER_WIDTH,
            hidden_size=WIDTH,
            image_size=SIDE,
            tokens_per_image=EMBEDDINGS,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
    )


def placeholders(side: int) -> list[int]:
    """Return the tokens of an image."""
    return [START, *[IMAGE] * EMBEDDINGS]


def inputs(sides: list[int], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images of one size."""
    shape = (len(sides), 3, SIDE, SIDE)
    return {"visual_inputs": GenericVisualInputs(pixel_values=torch.randn(shape, generator=generator))}


TOWER = Tower(provider, (PATCHES, 2 * PATCHES), one_or_two((SIDE,)), placeholders, inputs)
