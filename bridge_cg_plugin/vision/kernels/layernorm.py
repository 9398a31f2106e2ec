"""Backward of LayerNorm: one pass over the rows, and one small one that adds up the parameters' gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reduction import add_partials

# Programs that share the rows; each leaves one partial sum of the parameters' gradients.
PROGRAMS = 264


@triton.jit
def _layernorm_backward(
    gradient_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    rows,
    columns,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    weight_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * columns + column
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalized = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        weighted = gradient * weight
        along = tl.sum(weighted * normalized, axis=0) / columns
        mean = tl.sum(weighted, axis=0) / columns
        result = (weighted - (normalized * along + mean)) * rstd
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)
        weight_gradient += gradient * normalized
        bias_gradient += gradient
    target = partial_ptr + tl.program_id(0) * 2 * columns + column
    tl.store(target, weight_gradient, mask=inside)
    tl.store(target + columns, bias_gradient, mask=inside)


def layernorm_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of LayerNorm's input, weight and bias.

    Args:
        gradient: `[rows, width]`, of the output; contiguous, as is x.
        x: `[rows, width]`, the input.
        mean, rstd: `[rows]` fp32, of the forward.
        weight: `[width]`.
        zero_centered: Whether the norm multiplies by weight + 1.
    """
    rows, columns = x.shape
    out = torch.empty_like(gradient)
    programs = min(PROGRAMS, rows)
    partials = torch.empty((programs, 2 * columns), dtype=torch.float32, device=x.device)
    _layernorm_backward[(programs,)](
        gradient,
        x,
        mean,
        rstd,
        weight,
        out,
        partials,
        rows,
        columns,
        ZERO_CENTERED=zero_centered,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=8,
    )
    parameters = add_partials(partials, weight.dtype)
    return out, parameters[:columns], parameters[columns:]
