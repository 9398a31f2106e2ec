"""Nemotron VL: megatron-core's RADIO on tiles of 512 x 512 pixels. Positions are not drawn, to compare runs."""

from torch import nn

from bridge_cg_plugin.graphs.buckets import GRANULARITY, round_up
from bridge_cg_tools.benchmarks.models.encoder_case import Batch, Encoder, random
from bridge_cg_tools.benchmarks.models.radio_tower import build_radio


def build_nemotron_vl(layers: int) -> nn.Module:
    """Build the tower of Nemotron Nano 12B v2 VL (32 layers)."""
    model: nn.Module = build_radio(layers=layers, has_cpe=True, force_cpe_eval_mode=True)
    return model


def tiles_batch(model: nn.Module, tiles: int, seed: int) -> Batch:
    """Make so many random tiles. Buckets count what a tile's tokens, class tokens among them, are rounded up to."""
    pixels = random((tiles, 3, model.img_h, model.img_w), seed)
    gradient = random((tiles, model.seq_length, model.visual_hidden_size), seed + 1)
    return Batch({"x": pixels}, [gradient], tiles * round_up(model.seq_length, GRANULARITY), tiles)


ENCODER = Encoder(
    32,
    build_nemotron_vl,
    tiles_batch,
    lambda returned: [returned],
    {"1_tile": 1, "2_tiles": 2, "7_tiles": 7, "8_tiles": 8},
    modes=("plugin",),
)
