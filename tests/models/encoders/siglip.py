"""Gemma 3: Hugging Face's SigLIP, images of one size."""

from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import Batch, Encoder, peaked, random
from tests.models.mixes import CountMixes


def build_siglip(layers: int) -> nn.Module:
    """Build the tower of Gemma 3 (27 layers, 417 M parameters), without a pooling head as in Bridge's model."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "image_size": 896,
    }
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 56}
    sizes["vision_use_head"] = False  # the model asks for it; configurations take any field
    config = SiglipVisionConfig(num_hidden_layers=layers, patch_size=14, **sizes)
    return peaked(SiglipVisionModel._from_config(config), ("q_proj.weight", "k_proj.weight"))


def patches_of(model: nn.Module) -> int:
    """Return the patches of an image."""
    config: Any = model.config
    sides: int = config.image_size // config.patch_size
    return sides**2


def siglip_batch(model: nn.Module, images: int, seed: int) -> Batch:
    """Make so many random images."""
    config: Any = model.config
    patches = patches_of(model)
    pixels = random((images, config.num_channels, config.image_size, config.image_size), seed)
    gradient = random((images, patches, config.hidden_size), seed + 1)
    return Batch({"pixel_values": pixels, "return_dict": True}, [gradient], images * patches, images)


ENCODER = Encoder(
    27,
    build_siglip,
    siglip_batch,
    lambda returned: [returned.last_hidden_state],
    {"1_image": 1, "2_images": 2, "4_images": 4},
    modes=("plugin",),
    noise=("k_proj.bias",),  # softmax does not change with it
    mixes=CountMixes(patches_of),
)
