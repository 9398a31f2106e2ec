"""What to compile of the kernels of `layers` and `rotary` for a module's widths before anything is recorded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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


def compilations(modules: Sequence[nn.Module], tokens: int) -> Iterator[Compilation]:
    """Yield what compiles all that recordings of these modules call; nothing without Triton or a GPU.

    Args:
        modules: Roots of the modules.
        tokens: Rows of the matrices.
    """
    return _compilations(modules, tokens, _widths)


def of_language_models(modules: Sequence[nn.Module], tokens: int) -> Iterator[Compilation]:
    """Yield likewise for recordings that rotate and differentiate norms over heads by the plugin's kernels."""
    return _compilations(modules, tokens, _language_widths)


class _Widths(NamedTuple):
    """What kernels are compiled for, besides rows."""

    launches: Callable[..., None]
    sizes: tuple[Any, ...]


def _compilations(
    modules: Sequence[nn.Module], tokens: int, widths: Callable[[Sequence[nn.Module]], Iterator[_Widths]]
) -> Iterator[Compilation]:
    if kernels_available():
        from ...vision.kernels.launch import deferred

        for each in dict.fromkeys(widths(modules)):
            with deferred() as found:
                each.launches(tokens, *each.sizes)
            yield from found


def _widths(modules: Sequence[nn.Module]) -> Iterator[_Widths]:
    module: UpstreamModule
    for module in every_module(modules):
        if begins_with_layernorm(module):
            yield _Widths(_layernorm, (*module.layer_norm_weight.shape, module.layer_norm_weight.dtype))
        if is_te_layernorm(module):
            yield _Widths(_layernorm, (*module.weight.shape, module.weight.dtype))
        if adds_bias_before_activation(module):
            weight = module.linear_fc1.weight
            yield _Widths(_gelu if adds_bias_before_gelu(module) else _bias, (weight.shape[0], weight.dtype))
        if rotates_at_projection(module):
            heads, width = module.num_attention_heads_per_partition, module.hidden_size_per_attention_head
            yield _Widths(_attention, (heads, width, _dtype_of(module.linear_qkv)))
    yield from _rotations(modules)


def _rotations(modules: Sequence[nn.Module]) -> Iterator[_Widths]:
    """Yield the rotations of queries and of keys behind their projection."""
    module: UpstreamModule
    for module in every_module(modules):
        if is_bridges_attention(module) and not rotates_at_projection(module):
            width, dtype = module.hidden_size_per_attention_head, _dtype_of(module.linear_qkv)
            rounds = not module.config.apply_rotary_pos_emb_in_fp32
            for heads in (module.num_attention_heads_per_partition, module.num_query_groups_per_partition):
                yield _Widths(_rotation, (heads, width, dtype, rounds))


def _language_widths(modules: Sequence[nn.Module]) -> Iterator[_Widths]:
    yield from _rotations(modules)
    module: UpstreamModule
    for module in filter(is_head_norm, every_module(modules)):
        yield _Widths(_head_norm, (module.weight.dtype, module.zero_centered_gamma))


def _dtype_of(projection: nn.Module) -> torch.dtype:
    """Return the dtype of a projection, which an adapter may wrap."""
    return next(projection.parameters()).dtype


def _meta(*shape: int, dtype: torch.dtype, leaf: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=leaf)


def _layernorm(rows: int, width: int, dtype: torch.dtype) -> None:
    """LayerNorm's backward, with and without the residual's gradient, and what adds the bias before it."""
    from ...vision.kernels.bias import bias_residual
    from ...vision.kernels.layernorm import layernorm_backward

    x, scale = _meta(rows, width, dtype=dtype), _meta(width, dtype=dtype)
    statistics = _meta(rows, dtype=torch.float32)
    for residual in (None, x):
        layernorm_backward(x, x, statistics, statistics, scale, residual=residual)
    leaf, bias = (_meta(*shape, dtype=dtype, leaf=True) for shape in ((rows, width), (width,)))
    _backward(bias_residual(leaf, bias, x), (leaf, bias))


def _gelu(rows: int, width: int, dtype: torch.dtype) -> None:
    from ...vision.kernels.bias import bias_gelu

    x, bias = (_meta(*shape, dtype=dtype, leaf=True) for shape in ((rows, width), (width,)))
    _backward(bias_gelu(x, bias), (x, bias))


def _bias(rows: int, width: int, dtype: torch.dtype) -> None:
    from ...vision.kernels.bias import bias_add

    x, bias = (_meta(*shape, dtype=dtype, leaf=True) for shape in ((rows, width), (width,)))
    _backward(bias_add(x, bias), (x, bias))


def _rotation(tokens: int, heads: int, width: int, dtype: torch.dtype, rounds: bool) -> None:
    from ...vision.kernels.rotary import apply_rotary

    leaf, table = _meta(tokens, heads, width, dtype=dtype, leaf=True), _meta(tokens, width // 2, dtype=torch.float32)
    _backward(apply_rotary(leaf, table, table, rounds), (leaf,))


def _attention(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    """What comes before cuDNN's attention and after it; its frontend."""
    from ...vision.kernels.cudnn_graphs import load_frontend
    from ...vision.kernels.launch import defer
    from ...vision.kernels.padding import clear_padding
    from ...vision.kernels.rotary import rotate_qkv

    mixed = _meta(tokens, heads * 3 * width, dtype=dtype, leaf=True)
    table = _meta(tokens, width // 2, dtype=torch.float32)
    parts = rotate_qkv(mixed, table, table, heads)
    gradients = _meta(tokens, heads, 3, width, dtype=dtype).unbind(2)  # as cuDNN's attention leaves them
    torch.autograd.grad(parts, mixed, gradients)
    clear_padding(mixed.detach(), _meta(2, dtype=torch.int32))
    defer(load_frontend)


def _head_norm(rows: int, dtype: torch.dtype, zero_centered: bool) -> None:
    from ...vision.kernels import head_norms

    x, weight = (_meta(*shape, dtype=dtype) for shape in ((rows, head_norms.WIDTH), (head_norms.WIDTH,)))
    head_norms.backward(x, x, _meta(rows, dtype=torch.float32), weight, zero_centered, most=rows)


def _backward(out: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.autograd.grad(out, leaves, torch.empty_like(out))
