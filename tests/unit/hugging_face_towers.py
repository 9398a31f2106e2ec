"""Hugging Face's towers as Bridge's models build them, small, in fp32 on a CPU."""

import torch
from transformers import SiglipVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from .towers import loss_of

WINDOW_PATCH = 3 * 2 * 14 * 14
SIDE, SIGLIP_PATCH = 28, 14


def qwen25_config(layers: int = 4, **changes) -> Qwen2_5_VLVisionConfig:
    """Return a configuration whose second and last layer attend inside frames, the others inside windows."""
    settings = {
        "depth": layers,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 24,
        "fullatt_block_indexes": [1, layers - 1],
        "window_size": 112,
    }
    return Qwen2_5_VLVisionConfig(**{**settings, **changes})


def new_qwen25(seed: int = 0, attention: str = "sdpa", **changes):
    """Build the tower in training mode, with attention peaked as in a trained model."""
    torch.manual_seed(seed)
    config = qwen25_config(**changes)
    model = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv.weight" in name:
                parameter.normal_(std=0.3)
    return model.train()


def new_siglip(seed: int = 0, head: bool = False, **changes):
    """Build the tower in training mode; images are of 2 x 2 patches. Bridge's model has no pooling head."""
    torch.manual_seed(seed)
    settings = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": SIDE,
        "patch_size": SIGLIP_PATCH,
        "vision_use_head": head,
    }
    return SiglipVisionModel._from_config(SiglipVisionConfig(**{**settings, **changes})).train()


def draw_windows(rows, seed: int = 0):
    """Return random patches and the grid for them."""
    grid = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(1).sum()), WINDOW_PATCH, generator=generator), grid


def draw_images(count: int, seed: int = 0):
    """Return so many random images."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def run_qwen25(model, rows, seed: int = 0):
    """Return the embeddings, called as Bridge's model calls the tower."""
    pixels, grid = draw_windows(rows, seed)
    return [model(pixels, grid_thw=grid, return_dict=True).pooler_output]


def run_siglip(model, count, seed: int = 0):
    """Return the hidden states, and with a head the pooled ones, called as Bridge's model calls the tower."""
    returned = model(pixel_values=draw_images(count, seed), return_dict=True)
    return [t for t in (returned.last_hidden_state, returned.pooler_output) if t is not None]


def results(run, model, size, seed: int = 0):
    """Return outputs and the gradients of all trainable parameters."""
    outputs = run(model, size, seed)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [o.detach() for o in outputs], torch.autograd.grad(loss_of(outputs), wanted)
