"""Bridge's own models around Hugging Face's towers, small, on a CPU in fp32 or on a GPU in bf16."""

import copy
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from megatron.bridge.models.gemma import gemma3_provider
from megatron.bridge.models.gemma_vl import modeling_gemma3_vl
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from transformers import SiglipVisionConfig

from .hugging_face_towers import qwen25_config
from .vlm import language_layers, on_cpu

VOCABULARY, IMAGE, VIDEO, START = 128, 120, 121, 122
LENGTHS = 64
QWEN_PATCH = 3 * 2 * 14 * 14
# An image of Gemma's: 8 x 8 patches, pooled to 2 x 2 embeddings.
GEMMA_SIDE, GEMMA_EMBEDDINGS = 112, 4


@dataclass
class Sample:
    """One microbatch.

    Attributes:
        tokens: `[1, length]` with a placeholder for every embedding.
        visual: What the model's forward gets besides tokens and labels.
    """

    tokens: Tensor
    visual: dict[str, Tensor] = field(default_factory=dict)


def _text(embeddings: list[int], seed: int) -> Tensor:
    """Return text with placeholders of so many embeddings in between, of a length that every kernel takes."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 100, (5,), generator=generator)]
    for count in embeddings:
        parts += [torch.tensor([START]), torch.full((count,), IMAGE), torch.randint(0, 100, (3,), generator=generator)]
    tokens = torch.cat(parts)
    rest = torch.randint(0, 100, (-len(tokens) % LENGTHS,), generator=generator)
    return torch.cat((tokens, rest))[None]


def qwen25_sample(images, seed: int = 0) -> Sample:
    """Return a sample of images given as (height, width) in patches."""
    tokens = _text([h * w // 4 for h, w in images], seed)
    if not images:
        return Sample(tokens)
    grid = torch.tensor([(1, h, w) for h, w in images])
    pixels = torch.randn(int(grid.prod(1).sum()), QWEN_PATCH, generator=torch.Generator().manual_seed(seed))
    return Sample(tokens, {"pixel_values": pixels, "image_grid_thw": grid})


def gemma3_sample(images: int, seed: int = 0) -> Sample:
    """Return a sample of so many images."""
    tokens = _text([GEMMA_EMBEDDINGS] * images, seed)
    if not images:
        return Sample(tokens)
    shape = (images, 3, GEMMA_SIDE, GEMMA_SIDE)
    return Sample(tokens, {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(seed))})


def loss_of(model: nn.Module, sample: Sample) -> Tensor:
    """Run a model as Bridge's step does; returns the mean loss."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    visual = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in sample.visual.items()}
    tokens = sample.tokens.to(device)
    with everywhere():
        returned = model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=device)[None],
            attention_mask=None,
            labels=tokens.roll(-1, 1),
            **visual,
        )
    return (returned[0] if isinstance(returned, tuple) else returned).float().mean()


@contextmanager
def everywhere():
    """Let Bridge's models be built and run here: without a GPU, what they take from Transformer Engine is replaced."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(on_cpu())
        stack.enter_context(mock.patch.object(modeling_gemma3_vl, "TENorm", WrappedTorchNorm))
        yield


def _sizes(width: int = 64) -> dict:
    sizes = {
        "num_layers": 2,
        "hidden_size": width,
        "ffn_hidden_size": 2 * width,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": width // 2,
        "vocab_size": VOCABULARY,
        "should_pad_vocab": False,
        "seq_length": 256,
        "image_token_id": IMAGE,
        "gradient_accumulation_fusion": False,
        "vision_cuda_graph_impl": "transformer_engine",
    }
    if torch.cuda.is_available():
        return {**sizes, "bf16": True, "params_dtype": torch.bfloat16}
    fusions = ("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "persist_layer_norm")
    return {
        **sizes,
        **dict.fromkeys(fusions, False),
        "bf16": False,
        "params_dtype": torch.float32,
        "autocast_dtype": torch.float32,
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
    if torch.cuda.is_available():
        model = model.cuda().bfloat16()
    return model.train()


def build_qwen25_vl(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Qwen2.5-VL as a recipe's provider does."""
    sizes = _sizes()
    local = {} if torch.cuda.is_available() else {"transformer_layer_spec": language_layers()}
    provider = Qwen25VLModelProvider(
        **sizes,
        **local,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=[8, 4, 4],
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_config=qwen25_config(hidden_size=64, num_heads=4, out_hidden_size=sizes["hidden_size"]),
        **changes,
    )
    return _provided(provider, seed)


def build_gemma3_vl(seed: int = 0, **changes) -> nn.Module:
    """Build Bridge's Gemma 3 as a recipe's provider does."""
    sizes = _sizes()
    vision = SiglipVisionConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=GEMMA_SIDE,
        patch_size=14,
    )
    projector = modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig(
        input_size=64,
        hidden_size=sizes["hidden_size"],
        image_size=GEMMA_SIDE,
        tokens_per_image=GEMMA_EMBEDDINGS,
        layernorm_zero_centered_gamma=torch.cuda.is_available(),
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
    )
    local = {}
    if not torch.cuda.is_available():
        spec = copy.deepcopy(language_layers())
        spec.submodules.self_attention.module = gemma3_provider.Gemma3SelfAttention
        local = {"transformer_layer_spec": spec, "qk_layernorm": False, "layernorm_zero_centered_gamma": False}
    provider = Gemma3VLModelProvider(
        **sizes, **local, vision_config=vision, vision_projector_config=projector, **changes
    )
    return _provided(provider, seed)
