"""Nemotron Omni, its vision: megatron-core's RADIO on images of any size."""

import torch
from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider
from megatron.bridge.training import nemotron_omni_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch import Tensor

from tests.gpu.tower_case import IMAGE, SIZES, Inputs, Tower, one_or_two

from .nemotron_vl import LANGUAGE, LENGTH, few_layers

PATCH, CLASS_TOKENS = 16, 10
# In no sample. The default is the token that fills samples up.
SOUND = 4003
# Patches and class tokens of one image, and of two.
BUCKETS = (1088, 1600, 2112)


def provider() -> NemotronOmniModelProvider:
    """Return the provider of the model, its tower as Bridge's conversion sets it."""
    return NemotronOmniModelProvider(
        **LANGUAGE,
        language_model_type="nemotron6-moe",
        tokenizer_type="nemotron6-moe",
        image_token_index=IMAGE,
        sound_context_token_id=SOUND,
        use_vision_backbone_fp8_arch=False,
        vision_class_token_len=CLASS_TOKENS,
        radio_interpolate_only_cpe=False,
    )


def placeholders(size: tuple[int, int]) -> list[int]:
    """Return the token of an image, in whose place the model puts its embeddings."""
    return [IMAGE]


def inputs(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images as patches in one sequence."""
    sizes = torch.tensor(images)
    patches = sizes.prod(1)
    pixels = torch.randn(1, int(patches.sum()), 3 * PATCH**2, generator=generator)
    return {
        "visual_inputs": GenericVisualInputs(pixel_values=pixels),
        "imgs_sizes": sizes * PATCH,
        "num_image_tiles": (patches // 4).int(),
    }


TOWER = Tower(
    provider,
    BUCKETS,
    one_or_two(SIZES),
    placeholders,
    inputs,
    length=LENGTH,
    forward_step=nemotron_omni_step.forward_step,
    changed=few_layers,
)
