"""Backward of RMSNorm in one pass over the rows; the forward stays upstream's own."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .launch import launch
from .layernorm import load_rows, row_loop
from .reduction import PartialSum


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
        place, there, x, gradient = load_rows(x_ptr, gradient_ptr, row, rows, column, columns, inside)
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
    programs, constants = row_loop(rows, columns)
    sums = PartialSum(programs, columns, weight.dtype, x.device, deferred=False)
    grid = (programs,)
    launch(_rmsnorm_backward, grid, gradient, x, weight, out, sums.partials, rows, columns, epsilon, **constants)
    return out, sums.total()


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
