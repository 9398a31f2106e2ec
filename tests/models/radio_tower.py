"""Nemotron's vision tower, megatron-core's RADIO, full size on a GPU.

Without a GPU it is small, with layers that need no Transformer Engine kernel: the same code runs, for tests.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.performance.measure import on_gpu

PATCH = 16
# As Nemotron VL's provider sets them; megatron-core adds as many class tokens for layers that may compute in fp8.
TILE = {"img_h": 512, "img_w": 512, "max_img_h": 2048, "max_img_w": 2048, "class_token_len": 16}
SMALL_TILE = {"img_h": 64, "img_w": 64, "max_img_h": 128, "max_img_w": 128, "class_token_len": 2}
PEAKED = ("linear_qkv.weight",)


class TileAttention(nn.Module):
    """Attention inside each tile."""

    def __init__(self, config: Any, **unused: object) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> Tensor:
        """Attend; `query`, `key`, `value` are `[tokens, tiles, heads, width]`."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3).flatten(2)


def build_radio(seed: int = 0, layers: int = 32, packed: bool = False, **changes: Any) -> Any:
    """Build the tower with random weights, in training mode unless it is to stay in evaluation.

    Args:
        seed: Of the weights.
        layers: Transformer layers.
        packed: Whether it takes images of any size, or else tiles of one size.
        changes: Arguments of `RADIOViTModel`.
    """
    from tests.models.tower import start_process

    start_process()
    torch.manual_seed(seed)
    made = (_full if on_gpu() else _small)(layers, packed)
    model = _tower(*made, packed, changes)
    if on_gpu():
        model = model.cuda().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(PEAKED):
                parameter.normal_(std=0.05 if on_gpu() else 0.2)
    return model.train(not model.force_eval_mode)


def fp32_radio(model: Any, packed: bool = False, **changes: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a tower in fp32 without Transformer Engine, whose products round to TF32, and its parameters.

    Args:
        model: Whose weights it takes, and whose order its parameters have.
        packed: See `build_radio`.
        changes: As the model was built with.
    """
    config, _ = (_full if on_gpu() else _small)(model.config.num_layers, packed)
    config.params_dtype, config.bf16 = torch.float32, False
    made: nn.Module = _tower(config, local_spec(packed), packed, changes)
    made = made.to(next(model.parameters()).device).train(model.training)
    found = dict(made.named_parameters())
    ordered = [found[_local(name)] for name, _ in model.named_parameters()]
    with torch.no_grad():
        for copied, parameter in zip(ordered, model.parameters(), strict=True):
            copied.copy_(parameter)
    return made, ordered


def _local(name: str) -> str:
    """Return the name that a parameter of Transformer Engine's layers has in megatron-core's own."""
    for module, norm in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
        name = name.replace(f"{module}.layer_norm_", f"{norm}.")
    return name


def _tower(config: Any, spec: Any, packed: bool, changes: dict[str, Any]) -> Any:
    from megatron.core.models.vision.radio import RADIOViTModel

    settings = {**(TILE if on_gpu() else SMALL_TILE), **changes}
    return RADIOViTModel(config, spec, patch_dim=PATCH, dynamic_resolution=packed, **settings)


def _full(layers: int, packed: bool) -> tuple[Any, Any]:
    """Return the configuration that Bridge's provider makes, and Transformer Engine's layers."""
    from megatron.core.activations import fast_gelu
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=1280,
        ffn_hidden_size=5120,
        num_attention_heads=16,
        kv_channels=80,
        add_qkv_bias=True,
        activation_func=fast_gelu,
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    return config, get_vit_layer_with_transformer_engine_spec()


def _small(layers: int, packed: bool) -> tuple[Any, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=min(layers, 3),
        hidden_size=32,
        num_attention_heads=2,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    return config, local_spec(packed)


def local_spec(packed: bool) -> Any:
    """Return layers that need no Transformer Engine."""
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    from examples.photographs.small_tower import SegmentAttention

    spec = copy.deepcopy(get_vit_layer_with_local_spec())
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention if packed else TileAttention
    return spec


def segments_of(sizes: list[tuple[int, int]], device: torch.device | None = None) -> Any:
    """Return packed segments of the patches of images of (height, width) in pixels, as megatron-core's loaders do."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = torch.tensor([0, *((height // PATCH) * (width // PATCH) for height, width in sizes)], dtype=torch.int32)
    ends, longest = lengths.cumsum(0, dtype=torch.int32).to(device), lengths.max().to(device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
