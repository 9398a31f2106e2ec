"""Bias with what follows it, in one kernel each way: `residual + (x + bias)` and `gelu(x + bias)`; or `x + bias` alone.

Both ways round where eager rounds, so they equal eager to the last bit, except for the order in which the bias gradient
is added up in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .reduction import WIDE, Tiling, column_sum, may_wait, partial_sums
from .residual import Branch, current_stream

# Of GELU's backward, whose arithmetic wants other tiles than mere sums: the fastest of 60 at 784 to 16,384 rows of 4304
# on an H200, twice as fast at 784 as with tiles of 8 x 256.
GELU_BACKWARD = Tiling(rows=4, columns=128, most=8)
GELU_WARPS = 2


@triton.jit(do_not_specialize=["rows"])
def _bias_residual(x_ptr, bias_ptr, residual_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    kind = out_ptr.dtype.element_ty
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    x = (tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]).to(kind)
    residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (residual + x.to(tl.float32)).to(kind), mask=inside)


@triton.jit
def reciprocal(x):
    """Return 1 / x as the GPU's own instruction has it."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    """Return tanh of fp32 values as CUDA's `tanhf` rounds it; to be compiled without fused multiply-adds.

    CUDA's branches; here all parts are computed and one is taken, so that a thread's values need not wait.

    The same instructions: 1 - 2 / (exp(2 |x|) + 1) from 0.6 on, 1 where that rounds to it, an odd polynomial below.
    Only the sign of a zero differs.
    """
    size = tl.abs(x)
    large = tl.fma(reciprocal(tl.exp2(size * 2.885390043258667) + 1.0), -2.0, 1.0)
    large = tl.where(size >= 9.010913848876953, 1.0, large)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    large = (large.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    square = x * x
    small = tl.fma(square, 0.01573968306183815, -0.05230396240949631)
    small = tl.fma(small, square, 0.13315297663211823)
    small = tl.fma(small, square, -0.33332768082618713)
    small = tl.fma(small * square, x, x)
    return tl.where(size >= 0.6000000238418579, large, small)


@triton.jit
def _tanh_argument(x):
    # PyTorch's tanh approximation of GELU: sqrt(2 / pi) * (x + 0.044715 x^3), the sum as one multiply-add.
    return 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)


@triton.jit
def _gelu_slope(x):
    # PyTorch's order of operations and its multiply-adds, so that no gradient rounds to another neighbour.
    slope = tanh(_tanh_argument(x))
    inner = 0.7978845608028654 * tl.fma(x * x, 0.13414499163627625, 1.0)
    return tl.fma(1.0 + slope, 0.5, 0.5 * x * tl.fma(-slope, slope, 1.0) * inner)


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu(x_ptr, bias_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    kind = out_ptr.dtype.element_ty
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    x = (tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]).to(kind).to(tl.float32)
    tl.store(out_ptr + place, (0.5 * x * (1.0 + tanh(_tanh_argument(x)))).to(kind), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _bias_gelu_backward(
    gradient_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kind = out_ptr.dtype.element_ty
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = (tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]).to(kind).to(tl.float32)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
        result = (gradient * _gelu_slope(x)).to(kind)
        tl.store(out_ptr + place, result, mask=inside)
        total += tl.where(inside, result.to(tl.float32), 0.0)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, tl.sum(total, axis=0), mask=column < columns)


class _BiasResidual(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, branch: Branch | None) -> Tensor:
        out = torch.empty_like(residual)
        flat = x.reshape(-1, x.shape[-1])
        grid = WIDE.grid(*flat.shape)
        _bias_residual[grid](flat, bias, residual, out, *flat.shape, ROWS=WIDE.rows, COLUMNS=WIDE.columns)
        ctx.dtype, ctx.branch, ctx.may_wait = bias.dtype, branch, may_wait(bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        gradient, stream = gradient.contiguous(), current_stream()
        known = None
        if ctx.needs_input_grad[1] and ctx.may_wait() and stream is not None:
            known = stream.sum_of(gradient)  # LayerNorm's backward added it up as it made the gradient
        bias = known if known is not None and known.dtype == ctx.dtype else _bias_gradient(ctx, gradient)
        if ctx.branch is None or stream is None:
            return gradient, bias, gradient, None
        stream.leave(ctx.branch, gradient)
        return gradient, bias, None, None


def _bias_gradient(ctx: Any, gradient: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    return column_sum(gradient.contiguous().view(-1, gradient.shape[-1]), ctx.dtype, ctx.may_wait())


class _BiasGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        flat = x.view(-1, x.shape[-1])
        grid = WIDE.grid(*flat.shape)
        constants = {"ROWS": WIDE.rows, "COLUMNS": WIDE.columns}
        _bias_gelu[grid](flat, bias, out, *flat.shape, **constants, enable_fp_fusion=False)
        ctx.save_for_backward(x, bias)
        ctx.may_wait = may_wait(bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows, columns = gradient.view(-1, gradient.shape[-1]).shape
        out = torch.empty_like(x)
        tiles = GELU_BACKWARD.tiles_each(rows, columns)
        grid = GELU_BACKWARD.grid(rows, columns, tiles)
        partials, total = partial_sums(grid[0], columns, bias.dtype, x.device, ctx.may_wait())
        _bias_gelu_backward[grid](
            gradient,
            x,
            bias,
            out,
            partials,
            rows,
            columns,
            ROWS=GELU_BACKWARD.rows,
            COLUMNS=GELU_BACKWARD.columns,
            TILES=tiles,
            num_warps=GELU_WARPS,
            enable_fp_fusion=False,
        )
        return out, total() if ctx.needs_input_grad[1] else None


class _BiasAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype, ctx.may_wait = bias.dtype, may_wait(bias)
        return x + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradient, _bias_gradient(ctx, gradient)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """Return `x + bias`, whose gradient is summed over tokens by `column_sum`.

    Args:
        x: `[..., width]`.
        bias: `[width]` of x's dtype.
    """
    out: Tensor = _BiasAdd.apply(x, bias)
    return out


def bias_residual(x: Tensor, bias: Tensor, residual: Tensor, branch: Branch | None = None) -> Tensor:
    """Return `residual + (x + bias)`.

    Args:
        x: `[..., width]`.
        bias: `[width]` of x's dtype.
        residual: Like x, contiguous.
        branch: What x comes from, if the backward of the LayerNorm at its beginning is to add the residual's gradient.
    """
    out: Tensor = _BiasResidual.apply(x, bias, residual, branch)
    return out


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu(x + bias, approximate="tanh")`.

    Args:
        x: `[..., width]`.
        bias: `[width]` of x's dtype.
    """
    out: Tensor = _BiasGelu.apply(x, bias)
    return out
