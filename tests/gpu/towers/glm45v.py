"""GLM-4.5V: Hugging Face's tower, whose position embeddings are sampled; a language model with experts."""

import torch
from megatron.bridge.models.glm_vl.glm_45v_provider import GLM45VModelProvider
from torch import Tensor
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig

from tests.gpu.tower_case import (
    EAGER_RUNS_WITH_EXPERTS,
    END,
    FEW_EXPERTS,
    IMAGE,
    LAYERS,
    PATCH_BUCKETS,
    SIZES,
    START,
    WIDTH,
    Inputs,
    Tower,
    image_tokens,
    language_model,
    one_or_two,
    patch_inputs,
)

PATCH = 3 * 2 * 14 * 14


def provider() -> GLM45VModelProvider:
    """Return the provider of the model; as Bridge's conversion, it has no layer that predicts further tokens."""
    return GLM45VModelProvider(
        **language_model(),
        **FEW_EXPERTS,
        moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=WIDTH,
        mtp_num_layers=None,
        image_token_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
        vision_config=Glm4vVisionConfig(depth=LAYERS, intermediate_size=10944, out_hidden_size=WIDTH),
    )


def inputs(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images, and the kinds of tokens that the model takes positions from."""
    drawn = patch_inputs(PATCH)(images, tokens, generator)
    drawn["visual_inputs"].mm_token_type_ids = (tokens == IMAGE).long()
    return drawn


TOWER = Tower(provider, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, inputs, eager_runs=EAGER_RUNS_WITH_EXPERTS)
