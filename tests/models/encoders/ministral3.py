"""Ministral 3: Hugging Face's Pixtral, images padded to one size."""

from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import IMAGES, Batch, Encoder, device, peaked, random
from tests.models.workloads import Grid, tokens_of


def build_ministral3(layers: int) -> nn.Module:
    """Build the tower of Ministral 3 in the sizes of Mistral 3's default configuration (24 layers)."""
    from transformers import Mistral3Config
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

    torch.manual_seed(0)
    config: Any = Mistral3Config().vision_config
    config.num_hidden_layers = layers
    if not on_gpu():
        config.hidden_size, config.num_attention_heads, config.head_dim, config.intermediate_size = 32, 2, 16, 48
    return peaked(PixtralVisionModel._from_config(config), ("q_proj.weight", "k_proj.weight"))


def padded_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random images padded to one size; their sizes are announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    config: Any = model.config
    tokens = tokens_of(rows)
    host = torch.tensor([row[1:] for row in rows]) * config.patch_size
    sizes = host.to(device(), copy=True)
    GRIDS.remember(sizes, host)
    pixels = random((len(rows), config.num_channels, *host.amax(0).tolist()), seed)
    arguments = {"pixel_values": pixels, "image_sizes": sizes, "output_hidden_states": True, "return_dict": True}
    return Batch(arguments, [random((1, tokens, config.hidden_size), seed + 1)], tokens, len(rows))


ENCODER = Encoder(24, build_ministral3, padded_batch, lambda returned: [returned.hidden_states[-1]], IMAGES)
