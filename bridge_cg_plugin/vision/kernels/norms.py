"""Backward of LayerNorm and RMSNorm in one pass over the rows; the forward stays upstream's own.

LayerNorm's adds the residual stream's gradient on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .reduction import partial_sums

# Programs that share the rows; each leaves one partial sum of the parameters' gradients.
PROGRAMS = 264
# Elements that a program works on at once.
TILE = 4096
WARPS = 8


@triton.jit
def _load_rows(x_ptr, gradient_ptr, row, rows, column, columns, inside):
    """Return places, mask, input and gradient of some rows."""
    there = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + place, mask=there, other=0.0).to(tl.float32)
    return place, there, x, gradient


def _row_loop(rows: int, columns: int) -> tuple[int, dict[str, int]]:
    """Return how many programs share the rows, and the constants of a kernel whose programs loop over whole rows."""
    block = triton.next_power_of_2(columns)
    at_once = max(TILE // block, 1)
    return min(PROGRAMS, triton.cdiv(rows, at_once)), {"ROWS": at_once, "BLOCK": block, "num_warps": WARPS}


@triton.jit(do_not_specialize=["rows"])
def _layernorm_backward(
    gradient_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    rows,
    columns,
    ZERO_CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    weight_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    out_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        place, there, x, gradient = _load_rows(x_ptr, gradient_ptr, row, rows, column, columns, inside)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        normalized = tl.where(there, (x - mean) * rstd, 0.0)
        weighted = gradient * weight[None, :]
        along = tl.sum(weighted * normalized, axis=1)[:, None] / columns
        level = tl.sum(weighted, axis=1)[:, None] / columns
        result = ((weighted - (normalized * along + level)) * rstd).to(kind)
        if RESIDUAL:
            residual = tl.load(residual_ptr + place, mask=there, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) + residual).to(kind)
            out_sum += tl.sum(tl.where(there, result.to(tl.float32), 0.0), axis=0)
        tl.store(out_ptr + place, result, mask=there)
        weight_gradient += tl.sum(gradient * normalized, axis=0)
        bias_gradient += tl.sum(gradient, axis=0)
    sums = 3 if RESIDUAL else 2
    target = partial_ptr + tl.program_id(0) * sums * columns + column
    tl.store(target, weight_gradient, mask=inside)
    tl.store(target + columns, bias_gradient, mask=inside)
    if RESIDUAL:
        tl.store(target + 2 * columns, out_sum, mask=inside)


class LayerNormGradients(NamedTuple):
    """What LayerNorm's backward computes.

    Attributes:
        x: `[rows, width]`, of the input, with the residual's gradient added.
        weight, bias: `[width]`.
        x_sum: `[width]`, the sum of `x` over rows; None without a residual.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    x_sum: Tensor | None


def layernorm_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    zero_centered: bool = False,
    residual: Tensor | None = None,
    deferred: bool = False,
) -> LayerNormGradients:
    """Return the gradients of LayerNorm's input, weight and bias.

    Args:
        gradient: `[rows, width]`, of the output; contiguous, as is x.
        x: `[rows, width]`, the input.
        mean, rstd: `[rows]` fp32, of the forward.
        weight: `[width]`.
        zero_centered: Whether the norm multiplies by weight + 1.
        residual: As many elements as `gradient`, contiguous, of its dtype: what else flows into the input's gradient.
        deferred: Whether the sums over rows may be filled later; see `partial_sums`.

    Raises:
        ValueError: The residual does not fit the gradient.
    """
    rows, columns = x.shape
    if residual is not None and (residual.numel(), residual.dtype) != (gradient.numel(), gradient.dtype):
        raise ValueError(
            f"the residual's gradient {tuple(residual.shape)} {residual.dtype} does not fit LayerNorm's "
            f"{tuple(gradient.shape)} {gradient.dtype}"
        )
    out = torch.empty_like(gradient)
    programs, constants = _row_loop(rows, columns)
    width = columns * (2 if residual is None else 3)
    partials, added = partial_sums(programs, width, weight.dtype, x.device, deferred)
    tensors = gradient, x, mean, rstd, weight, gradient if residual is None else residual, out, partials
    _layernorm_backward[(programs,)](
        *tensors,
        rows,
        columns,
        **constants,
        ZERO_CENTERED=zero_centered,
        RESIDUAL=residual is not None,
        # Multiply-adds would be the compiler's choice, and might be another one with a residual than without.
        enable_fp_fusion=False,
    )
    total = added()
    x_sum = None if residual is None else total[2 * columns :]
    return LayerNormGradients(out, total[:columns], total[columns : 2 * columns], x_sum)


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_backward(
    gradient_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    rows,
    columns,
    epsilon,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        place, there, x, gradient = _load_rows(x_ptr, gradient_ptr, row, rows, column, columns, inside)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / columns + epsilon)[:, None]
        normalized = x * rstd
        weighted = gradient * weight[None, :]
        along = tl.sum(weighted * normalized, axis=1)[:, None] / columns
        tl.store(out_ptr + place, ((weighted - normalized * along) * rstd).to(kind), mask=there)
        weight_gradient += tl.sum(gradient * normalized, axis=0)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, weight_gradient, mask=inside)


def rmsnorm_backward(gradient: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm's input and weight.

    Args:
        gradient, x: `[rows, width]`, of the output, and the input; contiguous.
        weight: `[width]`.
        epsilon: What is added to a row's mean square.
    """
    rows, columns = x.shape
    out = torch.empty_like(x)
    programs, constants = _row_loop(rows, columns)
    partials, total = partial_sums(programs, columns, weight.dtype, x.device, deferred=False)
    arguments = gradient, x, weight, out, partials, rows, columns, epsilon
    _rmsnorm_backward[(programs,)](*arguments, **constants)
    return out, total()


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, forward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        rows, inputs = (t.contiguous().view(-1, t.shape[-1]) for t in (gradient, x))
        of_x, of_weight = rmsnorm_backward(rows, inputs, weight, ctx.epsilon)
        return of_x.view_as(x), of_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `forward(x)`, which is `weight * x / sqrt(mean(x**2) + epsilon)`, with a backward of one kernel.

    Args:
        x: `[..., width]`.
        weight: `[width]` of x's dtype.
        epsilon: What is added to a row's mean square.
        forward: Upstream's own.
    """
    out: Tensor = _RmsNorm.apply(x, weight, epsilon, forward)
    return out
