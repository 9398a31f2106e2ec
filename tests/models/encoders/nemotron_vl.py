"""Nemotron VL: megatron-core's RADIO on tiles of 512 x 512 pixels. Positions are not drawn, to compare runs."""

from typing import Any

from torch import nn

from bridge_cg_plugin.graphs.buckets import GRANULARITY, round_up
from tests.models.encoder_case import Batch, Encoder, Fp32Copy, random
from tests.models.mixes import CountMixes
from tests.models.radio_tower import build_radio, fp32_radio

SETTINGS = {"has_cpe": True, "force_cpe_eval_mode": True}


def build_nemotron_vl(layers: int) -> nn.Module:
    """Build the tower of Nemotron Nano 12B v2 VL (32 layers)."""
    model: nn.Module = build_radio(layers=layers, **SETTINGS)
    return model


def room_of(model: nn.Module) -> int:
    """Return what a tile counts: its tokens, class tokens among them, rounded up."""
    tokens: Any = model.seq_length
    return round_up(tokens, GRANULARITY)


def tiles_batch(model: nn.Module, tiles: int, seed: int) -> Batch:
    """Make so many random tiles."""
    radio: Any = model
    pixels = random((tiles, 3, radio.img_h, radio.img_w), seed)
    gradient = random((tiles, radio.seq_length, radio.visual_hidden_size), seed + 1)
    return Batch({"x": pixels}, [gradient], tiles * room_of(model), tiles)


ENCODER = Encoder(
    32,
    build_nemotron_vl,
    tiles_batch,
    lambda returned: [returned],
    {"1_tile": 1, "2_tiles": 2, "7_tiles": 7, "8_tiles": 8},
    mixes=CountMixes(room_of),
    reference=lambda encoder, model: Fp32Copy(encoder, *fp32_radio(model, **SETTINGS)),
)
