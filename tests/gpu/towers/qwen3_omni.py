"""Qwen3-Omni, its vision and its audio: Hugging Face's towers; a language model with experts."""

import random

import torch
from megatron.bridge.models.qwen_omni import qwen3_omni_step
from megatron.bridge.models.qwen_omni.qwen3_omni_provider import Qwen3OmniModelProvider
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from tests.gpu.tower_case import (
    EAGER_RUNS_WITH_EXPERTS,
    END,
    FEW_EXPERTS,
    IMAGE,
    LAYERS,
    PATCH_BUCKETS,
    SEQUENCE,
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

PATCH, MEL = 3 * 2 * 16 * 16, 128
SOUND, SOUND_START, SOUND_END = 4003, 4004, 4005
# Frames of a sound: chunks have 100, windows 800.
LENGTHS = (300, 520, 800, 1040)

type Item = tuple[int, int] | int


def provider() -> Qwen3OmniModelProvider:
    """Return the provider of the model."""
    vision = {"depth": LAYERS, "deepstack_visual_indexes": [0, LAYERS // 2], "out_hidden_size": WIDTH}
    audio = {"encoder_layers": LAYERS, "n_window": 50, "n_window_infer": 800, "output_dim": WIDTH}
    sizes = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    return Qwen3OmniModelProvider(
        **language_model(),
        **FEW_EXPERTS,
        language_max_sequence_length=SEQUENCE,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        audio_token_id=SOUND,
        audio_start_token_id=SOUND_START,
        audio_end_token_id=SOUND_END,
        thinker_config=Qwen3OmniMoeThinkerConfig(vision_config=vision, audio_config={**audio, **sizes}),
    )


def draw(rng: random.Random) -> list[Item]:
    """Draw one or two images, and a sound: Bridge's model takes no more than one of a sample."""
    return [*one_or_two(SIZES)(rng), rng.choice(LENGTHS)]


def placeholders(item: Item) -> list[int]:
    """Return the tokens of an image, or of a sound of so many frames."""
    if isinstance(item, tuple):
        return image_tokens(item)
    chunks, rest = divmod(item, 100)
    return [SOUND_START, *[SOUND] * (13 * chunks + (rest + 7) // 8), SOUND_END]


def inputs(items: list[Item], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images and a sound."""
    *images, frames = items
    return {
        **patch_inputs(PATCH)(images, tokens, generator),
        "input_features": torch.randn(1, MEL, frames, generator=generator),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
    }


TOWER = Tower(
    provider,
    PATCH_BUCKETS,
    draw,
    placeholders,
    inputs,
    forward_step=qwen3_omni_step.forward_step,
    encoders=2,
    eager_runs=EAGER_RUNS_WITH_EXPERTS,
)
