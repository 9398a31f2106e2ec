"""GLM-4.5V: Hugging Face's tower, whose position embeddings are sampled."""

from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import IMAGES, RMSNORM_STD, Encoder, patches_batch, peaked


def build_glm45v(layers: int) -> nn.Module:
    """Build the tower of GLM-4.5V (24 layers); transformers' default is the wider merger of GLM-4.1V."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"intermediate_size": 10944}
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24, "image_size": 56}
    config = Glm4vVisionConfig(depth=layers, **sizes)
    return peaked(Glm4vVisionModel._from_config(config), ("qkv.weight",), RMSNORM_STD)


ENCODER = Encoder(24, build_glm45v, patches_batch, lambda returned: [returned.pooler_output], IMAGES)
