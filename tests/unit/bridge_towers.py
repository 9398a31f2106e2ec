"""Bridge's own models around Hugging Face's towers, small, in fp32 on a CPU."""

import copy
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.bridge.models.gemma import gemma3_provider
from megatron.bridge.models.gemma_vl import modeling_gemma3_vl
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.glm_vl.glm_45v_provider import GLM45VModelProvider
from megatron.bridge.models.ministral3.ministral3_provider import Ministral3ModelProvider
from megatron.bridge.models.qwen_omni import qwen3_omni_provider, qwen25_omni_provider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from transformers import Mistral3Config, SiglipVisionConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from tests.models.language_model import DENSE

from .hugging_face_towers import (
    OMNI_PATCH,
    PIXTRAL_PATCH,
    WINDOW_PATCH,
    draw_padded,
    glm45v_config,
    pixtral_config,
    qwen3_omni_config,
    qwen25_config,
    qwen25_omni_config,
)
from .vlm import language_layers, on_cpu

VOCABULARY, IMAGE, VIDEO, START, AUDIO_TOKEN = 128, 120, 121, 122, 123
LENGTHS = 64
# An image of Gemma's: 8 x 8 patches, pooled to 2 x 2 embeddings.
GEMMA_SIDE, GEMMA_EMBEDDINGS = 112, 4


@dataclass
class Sample:
    """One microbatch.

    Attributes:
        tokens: `[1, length]` with a placeholder for every embedding.
        visual: What the model's forward gets besides tokens and labels, or in place of positions.
    """

    tokens: Tensor
    visual: dict[str, Tensor | None] = field(default_factory=dict)


def _text(embeddings: list[int], seed: int) -> Tensor:
    """Return text with placeholders of so many embeddings in between, of a length that every kernel takes."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 100, (5,), generator=generator)]
    for count in embeddings:
        parts += [torch.tensor([START]), torch.full((count,), IMAGE), torch.randint(0, 100, (3,), generator=generator)]
    tokens = torch.cat(parts)
    rest = torch.randint(0, 100, (-len(tokens) % LENGTHS,), generator=generator)
    return torch.cat((tokens, rest))[None]


def qwen25_sample(images, seed: int = 0, width: int = WINDOW_PATCH) -> Sample:
    """Return a sample of images given as (height, width) in patches."""
    tokens = _text([h * w // 4 for h, w in images], seed)
    if not images:
        return Sample(tokens)
    grid = torch.tensor([(1, h, w) for h, w in images])
    pixels = torch.randn(int(grid.prod(1).sum()), width, generator=torch.Generator().manual_seed(seed))
    return Sample(tokens, {"pixel_values": pixels, "image_grid_thw": grid})


def glm45v_sample(images, seed: int = 0) -> Sample:
    """Return a sample as `qwen25_sample` does, with the kinds of tokens that the model takes positions from."""
    sample = qwen25_sample(images, seed)
    kinds = (sample.tokens == IMAGE).long()
    return Sample(sample.tokens, {**sample.visual, "mm_token_type_ids": kinds})


def qwen25_omni_sample(images, seed: int = 0, width: int = WINDOW_PATCH) -> Sample:
    """Return a sample as `qwen25_sample` does; the model finds positions itself."""
    sample = qwen25_sample(images, seed, width)
    return Sample(sample.tokens, {**sample.visual, "position_ids": None})


def qwen3_omni_sample(images, seed: int = 0) -> Sample:
    """Return a sample as `qwen25_omni_sample` does."""
    return qwen25_omni_sample(images, seed, OMNI_PATCH)


def qwen3_omni_heard(frames: int, images=(), seed: int = 0) -> Sample:
    """Return a sample of images and one audio clip of so many frames, as upstream's step passes them."""
    sample = qwen3_omni_sample(images, seed)
    embeddings = frames // 100 * 13 + (frames % 100 + 7) // 8
    clip = torch.cat((torch.full((embeddings,), AUDIO_TOKEN), torch.zeros(-embeddings % LENGTHS, dtype=torch.long)))
    features = torch.randn(1, 128, frames + 7, generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(frames + 7) < frames).long()[None]
    heard = {"input_features": features, "feature_attention_mask": mask}
    return Sample(torch.cat((sample.tokens, clip[None]), 1), {**sample.visual, **heard})


def ministral3_sample(images, seed: int = 0) -> Sample:
    """Return a sample of images given as (height, width) in patches, 2 x 2 of which are an embedding."""
    tokens = _text([h * w // 4 for h, w in images], seed)
    if not images:
        return Sample(tokens)
    pixels, sizes = draw_padded([(1, *size) for size in images], seed)
    return Sample(tokens, {"pixel_values": pixels, "image_sizes": sizes})


def gemma3_sample(images: int, seed: int = 0) -> Sample:
    """Return a sample of so many images."""
    tokens = _text([GEMMA_EMBEDDINGS] * images, seed)
    if not images:
        return Sample(tokens)
    shape = (images, 3, GEMMA_SIDE, GEMMA_SIDE)
    return Sample(tokens, {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(seed))})


def loss_of(model: nn.Module, sample: Sample) -> Tensor:
    """Run a model as Bridge's step does; returns the mean loss."""
    tokens, positions = sample.tokens, torch.arange(sample.tokens.shape[1])[None]
    with everywhere():
        arguments = {"position_ids": positions, **sample.visual}
        returned = model(input_ids=tokens, attention_mask=None, labels=tokens.roll(-1, 1), **arguments)
    return (returned[0] if isinstance(returned, tuple) else returned).float().mean()


@contextmanager
def everywhere():
    """Let Bridge's models be built and run here: what they take from Transformer Engine is replaced."""
    with ExitStack() as stack:
        stack.enter_context(on_cpu())
        stack.enter_context(mock.patch.object(modeling_gemma3_vl, "TENorm", WrappedTorchNorm))
        for module in (qwen25_omni_provider, qwen3_omni_provider):
            made = mock.patch.object(module, "get_gpt_layer_with_transformer_engine_spec", _local_layers)
            stack.enter_context(made)
        yield


def _local_layers(*args: Any, **kwargs: Any) -> Any:
    return language_layers()


SIZES = {
    **{"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 2},
    **{"kv_channels": 32, "vocab_size": VOCABULARY, "should_pad_vocab": False, "seq_length": 256},
    **{"image_token_id": IMAGE, "vision_cuda_graph_impl": "transformer_engine"},
    **dict.fromkeys(("params_dtype", "autocast_dtype"), torch.float32),
    **dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("persist_layer_norm", "gradient_accumulation_fusion", "bf16"), False),
    "use_cpu_initialization": True,
}


def _provided(provider, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    # megatron-core writes the choice of attention into the environment, and refuses another model's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    with everywhere(), mock.patch.dict(os.environ, kept, clear=True):
        model = provider.provide(pre_process=True, post_process=True)
    return model.train()


# What a provider of a model with experts asks for besides them.
WITHOUT_EXPERTS = {
    "num_moe_experts": None,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_load_balancing_type": "none",
}


# Sizes of a vision tower in the words of most.
TOWER = {"hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
QWEN = {**DENSE, "mrope_section": [8, 4, 4], "video_token_id": VIDEO, "vision_start_token_id": START}


def _build(provider, seed: int, local: bool = True, **fields) -> nn.Module:
    """Build a model as a recipe's provider does; layers that need no kernels are its own, or `local`."""
    layers = {"transformer_layer_spec": language_layers()} if local else {}
    return _provided(provider(**{**SIZES, **layers, **fields}), seed)


def build_qwen25_vl(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Qwen2.5-VL."""
    return _build(Qwen25VLModelProvider, seed, **QWEN, vision_config=qwen25_config(**TOWER), **changes)


def build_gemma3_vl(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Gemma 3."""
    vision = SiglipVisionConfig(
        **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
        **{"image_size": GEMMA_SIDE, "patch_size": 14},
    )
    projector = modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig(
        **{"input_size": 64, "hidden_size": 64, "image_size": GEMMA_SIDE, "tokens_per_image": GEMMA_EMBEDDINGS},
        **{"layernorm_zero_centered_gamma": False, "use_cpu_initialization": True},
        gradient_accumulation_fusion=False,
    )
    spec = copy.deepcopy(language_layers())
    spec.submodules.self_attention.module = gemma3_provider.Gemma3SelfAttention
    local = {"transformer_layer_spec": spec, "qk_layernorm": False, "layernorm_zero_centered_gamma": False}
    # A layer that sees little, and one that sees all.
    local |= {"interleaved_attn_pattern": (1, 1), "window_size": 16}
    fields = {**local, "vision_config": vision, "vision_projector_config": projector, **changes}
    return _build(Gemma3VLModelProvider, seed, **fields)


def build_glm45v(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's GLM-4.5V without experts."""
    fields = {
        **WITHOUT_EXPERTS,
        **{"moe_shared_expert_overlap": False, "moe_shared_expert_intermediate_size": None},
        **{"moe_ffn_hidden_size": None, "moe_router_enable_expert_bias": False, "moe_layer_freq": [0, 0]},
        **{"mtp_num_layers": None, "mrope_section": [2, 3, 3], "video_token_id": VIDEO, "image_start_token_id": START},
    }
    return _build(GLM45VModelProvider, seed, **DENSE, **fields, vision_config=glm45v_config(**TOWER), **changes)


AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 64}


def build_qwen25_omni(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Qwen2.5-Omni."""
    thinker = Qwen2_5OmniThinkerConfig(vision_config=qwen25_omni_config(**TOWER).to_dict(), audio_config=AUDIO)
    fields = {**QWEN, "audio_token_id": AUDIO_TOKEN, "thinker_config": thinker, **changes}
    return _build(qwen25_omni_provider.Qwen25OmniModelProvider, seed, local=False, **fields)


def build_qwen3_omni(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Qwen3-Omni without experts."""
    audio = {**AUDIO, "downsample_hidden_size": 16, "n_window": 50, "n_window_infer": 400}
    vision = qwen3_omni_config(**TOWER).to_dict()
    thinker = Qwen3OmniMoeThinkerConfig(vision_config=vision, audio_config=audio)
    fields = {**QWEN, **WITHOUT_EXPERTS, "qk_layernorm": False, "audio_token_id": AUDIO_TOKEN, **changes}
    fields["thinker_config"] = thinker
    return _build(qwen3_omni_provider.Qwen3OmniModelProvider, seed, local=False, **fields)


def build_ministral3(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Ministral 3."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    text = {"model_type": "ministral3", "hidden_size": 64, "num_attention_heads": 2}
    config = Mistral3Config(
        vision_config=pixtral_config(hidden_size=64, num_attention_heads=4, image_size=32 * PIXTRAL_PATCH).to_dict(),
        text_config={**text, "rope_parameters": {**rope, "original_max_position_embeddings": 256}},
    )
    return _build(Ministral3ModelProvider, seed, **DENSE, hf_config=config, **changes)
