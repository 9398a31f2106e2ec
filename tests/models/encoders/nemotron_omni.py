"""Nemotron Omni: megatron-core's RADIO on images of any size, which stays in evaluation mode."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.encoder_case import IMAGES, Batch, Encoder, Fp32Copy, device, random
from tests.models.mixes import ImageMixes
from tests.models.radio_tower import PATCH, build_radio, fp32_radio, segments_of
from tests.models.workloads import Grid, tokens_of

CLASS_TOKENS = 10
SETTINGS = {"force_eval_mode": True, "force_cpe_eval_mode": True, "class_token_len": CLASS_TOKENS}


class PackedTower(nn.Module):
    """Holds the tower, whose forward changes the segments that it gets."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.vision_model, self.config = tower, tower.config

    def forward(self, x: Tensor, sizes: Tensor, segments: Any) -> Tensor:
        """Call the tower with segments of its own."""
        found: Tensor = self.vision_model(x, imgs_sizes=sizes, packed_seq_params=copy.copy(segments))
        return found


def build_nemotron_omni(layers: int) -> nn.Module:
    """Build the tower of Nemotron 3 Nano Omni (32 layers), as Bridge's conversion of its configuration sets it up."""
    return PackedTower(build_radio(layers=layers, packed=True, **SETTINGS))


def fp32_copy(encoder: Encoder, model: Any) -> Fp32Copy:
    """Return the tower in fp32."""
    tower, parameters = fp32_radio(model.vision_model, packed=True, **SETTINGS)
    return Fp32Copy(encoder, PackedTower(tower), parameters)


def images_batch(model: Any, rows: Grid, seed: int) -> Batch:
    """Make random images of so many patches; the layers see class tokens of each, too."""
    sizes, tower = [(height * PATCH, width * PATCH) for _, height, width in rows], model.vision_model
    tokens = tokens_of(rows) + len(rows) * tower.class_token_len
    arguments = {
        "x": random((1, tokens_of(rows), 3 * PATCH**2), seed),
        "sizes": torch.tensor(sizes),
        "segments": segments_of(sizes, device()),
    }
    return Batch(arguments, [random((1, tokens, tower.visual_hidden_size), seed + 1)], tokens, len(rows))


ENCODER = Encoder(
    32,
    build_nemotron_omni,
    images_batch,
    lambda returned: [returned],
    IMAGES,
    mixes=ImageMixes(CLASS_TOKENS),
    reference=fp32_copy,
)
