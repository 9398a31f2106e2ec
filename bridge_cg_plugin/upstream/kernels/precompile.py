"""What to compile of the kernels of `layers` and `rotary` for a module's widths before anything is recorded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.instance import every_module
from ...graphs.recordings.compiling import Compilation
from ...upstream_types import UpstreamModule
from .layers import (
    adds_bias_before_activation,
    adds_bias_before_gelu,
    begins_with_layernorm,
    is_head_norm,
    is_te_layernorm,
    kernels_available,
)
from .rotary import is_bridges_attention, rotates_at_projection

# What launches kernels for a number of rows, and what else it takes: widths and dtypes.
Launch = tuple[Callable[..., None], tuple[Any, ...]]


def compilations(modules: Sequence[nn.Module], tokens: int) -> Iterator[Compilation]:
    """Yield what compiles all that recordings of these modules call; nothing without Triton or a GPU.

    Args:
        modules: Roots of the modules.
        tokens: Rows of the matrices.
    """
    return _compilations(modules, tokens, _of_encoders)


def of_language_models(modules: Sequence[nn.Module], tokens: int) -> Iterator[Compilation]:
    """Yield likewise for recordings that rotate and differentiate norms over heads by the plugin's kernels."""
    return _compilations(modules, tokens, _of_language_models)


def _compilations(
    modules: Sequence[nn.Module], tokens: int, launches: Callable[[UpstreamModule], Iterator[Launch]]
) -> Iterator[Compilation]:
    if kernels_available():
        from ...vision.kernels.launch import deferred

        for launch, others in dict.fromkeys(each for module in every_module(modules) for each in launches(module)):
            with deferred() as found:
                launch(tokens, *others)
            yield from found


def _of_encoders(module: UpstreamModule) -> Iterator[Launch]:
    if begins_with_layernorm(module):
        yield _layernorm, (*module.layer_norm_weight.shape, module.layer_norm_weight.dtype)
    if is_te_layernorm(module):
        yield _layernorm, (*module.weight.shape, module.weight.dtype)
    if adds_bias_before_activation(module):
        weight = module.linear_fc1.weight
        yield _bias, (weight.shape[0], weight.dtype, "bias_gelu" if adds_bias_before_gelu(module) else "bias_add")
    if rotates_at_projection(module):
        heads, width = module.num_attention_heads_per_partition, module.hidden_size_per_attention_head
        yield _attention, (heads, width, _dtype_of(module.linear_qkv))
    yield from _rotations(module)


def _rotations(module: UpstreamModule) -> Iterator[Launch]:
    """Yield the rotations of queries and of keys behind their projection."""
    if is_bridges_attention(module) and not rotates_at_projection(module):
        width, dtype = module.hidden_size_per_attention_head, _dtype_of(module.linear_qkv)
        rounds = not module.config.apply_rotary_pos_emb_in_fp32
        for heads in (module.num_attention_heads_per_partition, module.num_query_groups_per_partition):
            yield _rotation, (heads, width, dtype, rounds)


def _of_language_models(module: UpstreamModule) -> Iterator[Launch]:
    yield from _rotations(module)
    if is_head_norm(module):
        yield _head_norm, (module.weight.dtype, module.zero_centered_gamma)


def _dtype_of(projection: nn.Module) -> torch.dtype:
    """Return the dtype of a projection, which an adapter may wrap."""
    return next(projection.parameters()).dtype


def _meta(*shape: int, dtype: torch.dtype = torch.float32, leaf: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=leaf)


def _layernorm(rows: int, width: int, dtype: torch.dtype) -> None:
    """LayerNorm's backward, with and without the residual's gradient, and what adds the bias before it."""
    from ...vision.kernels.bias import bias_residual
    from ...vision.kernels.norms import layernorm_backward

    x, scale, statistics = _meta(rows, width, dtype=dtype), _meta(width, dtype=dtype), _meta(rows)
    for residual in (None, x):
        layernorm_backward(x, x, statistics, statistics, scale, residual=residual)
    leaf, bias = (_meta(*shape, dtype=dtype, leaf=True) for shape in ((rows, width), (width,)))
    _backward(bias_residual(leaf, bias, x), (leaf, bias))


def _bias(rows: int, width: int, dtype: torch.dtype, kernel: str) -> None:
    from ...vision.kernels import bias as kernels

    x, bias = (_meta(*shape, dtype=dtype, leaf=True) for shape in ((rows, width), (width,)))
    _backward(getattr(kernels, kernel)(x, bias), (x, bias))


def _rotation(tokens: int, heads: int, width: int, dtype: torch.dtype, rounds: bool) -> None:
    from ...vision.kernels.rotary import apply_rotary

    leaf, table = _meta(tokens, heads, width, dtype=dtype, leaf=True), _meta(tokens, width // 2)
    _backward(apply_rotary(leaf, table, table, rounds), (leaf,))


def _attention(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    """What comes before cuDNN's attention and after it; its frontend."""
    from ...vision.kernels.cudnn_graphs import load_frontend
    from ...vision.kernels.launch import defer
    from ...vision.kernels.padding import clear_padding
    from ...vision.kernels.rotary import rotate_qkv

    mixed, table = _meta(tokens, heads * 3 * width, dtype=dtype, leaf=True), _meta(tokens, width // 2)
    parts = rotate_qkv(mixed, table, table, heads)
    gradients = _meta(tokens, heads, 3, width, dtype=dtype).unbind(2)  # as cuDNN's attention leaves them
    torch.autograd.grad(parts, mixed, gradients)
    clear_padding(mixed.detach(), _meta(2, dtype=torch.int32))
    defer(load_frontend)


def _head_norm(rows: int, dtype: torch.dtype, zero_centered: bool) -> None:
    from ...vision.kernels import head_norms

    x, weight = (_meta(*shape, dtype=dtype) for shape in ((rows, head_norms.WIDTH), (head_norms.WIDTH,)))
    head_norms.backward(x, x, _meta(rows), weight, zero_centered, most=rows)


def _backward(out: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.autograd.grad(out, leaves, torch.empty_like(out))
