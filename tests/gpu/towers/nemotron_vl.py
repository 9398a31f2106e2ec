"""Nemotron VL: megatron-core's RADIO on tiles of 512 x 512 pixels."""

from typing import Any
from unittest import mock

import torch
from megatron.bridge.models.nemotron_vl.nemotron_vl_provider import NemotronVLModelProvider
from megatron.bridge.training import llava_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from tests.gpu.tower_case import LAYERS, Inputs, Tower, language_model, one_or_two

# Where Bridge's provider lets megatron-core's model look for images. It is no token of the language model.
IMAGE = 131072
SIDE, EMBEDDINGS, LENGTH, MOST_TILES = 512, 256, 128, 4
# What a tile counts: its 1024 patches and 16 class tokens, rounded up.
ROOM = 1088
# Attention and MLPs: kernels of Mamba are not installed everywhere.
PATTERN = "*-*-"
LANGUAGE = language_model(
    num_layers=None,
    hybrid_layer_pattern=PATTERN,
    seq_length=LENGTH + MOST_TILES * EMBEDDINGS,
    attention_backend=AttnBackend.auto,  # the default is FlashAttention, which is not installed everywhere either
)


def radio(config: Any, *args: Any, **kwargs: Any) -> RADIOViTModel:
    """Build the tower with a few layers; Bridge's providers say 32."""
    config.num_layers = LAYERS
    return RADIOViTModel(config, *args, **kwargs)


def few_layers() -> Any:
    """Let megatron-core's model build the tower with a few layers."""
    return mock.patch.object(llava_model, "RADIOViTModel", radio)


def provider() -> NemotronVLModelProvider:
    """Return the provider of the model."""
    return NemotronVLModelProvider(**LANGUAGE)


def placeholders(tiles: int) -> list[int]:
    """Return the token of an image, in whose place the model puts embeddings of all tiles."""
    return [IMAGE]


def inputs(images: list[int], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw the tiles of all images."""
    pixels = torch.randn(sum(images), 3, SIDE, SIDE, generator=generator).bfloat16()
    return {
        "visual_inputs": GenericVisualInputs(pixel_values=pixels),
        "num_patches": torch.tensor(images, dtype=torch.int32),
    }


TOWER = Tower(
    provider,
    tuple(ROOM * tiles for tiles in (1, 2, MOST_TILES)),
    one_or_two((1, 2)),
    placeholders,
    inputs,
    length=LENGTH,
    forward_step=llava_step.forward_step,
    changed=few_layers,
)
