"""Triton kernels of gated SiLU times a row's weight, which leave rows behind the last bound alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a block takes at once.
MOST_COLUMNS = 2048


@triton.jit
def _swiglu(inner_ptr, weights_ptr, bounds_ptr, out_ptr, experts, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(bounds_ptr + experts):
        weight = tl.load(weights_ptr + row).to(tl.float32)
        for start in tl.range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < columns
            gate = tl.load(inner_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
            linear = tl.load(inner_ptr + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
            out = gate * tl.sigmoid(gate) * linear * weight
            tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    gradient_ptr,
    inner_ptr,
    weights_ptr,
    bounds_ptr,
    inner_gradient_ptr,
    weights_gradient_ptr,
    experts,
    columns,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(bounds_ptr + experts):
        weight = tl.load(weights_ptr + row).to(tl.float32)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for start in tl.range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < columns
            gradient = tl.load(gradient_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(inner_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
            linear = tl.load(inner_ptr + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
            open_share = tl.sigmoid(gate)
            opened = gate * open_share
            total += gradient * opened * linear
            gradient *= weight
            of_gate = gradient * linear * (open_share + opened * (1.0 - open_share))
            kind = inner_gradient_ptr.dtype.element_ty
            tl.store(inner_gradient_ptr + row * 2 * columns + column, of_gate.to(kind), mask=inside)
            tl.store(inner_gradient_ptr + (row * 2 + 1) * columns + column, (gradient * opened).to(kind), mask=inside)
        tl.store(weights_gradient_ptr + row, tl.sum(total, 0).to(weights_gradient_ptr.dtype.element_ty))


def swiglu(inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return `silu(gate) * linear * weight` of every row, `[rows, width]`; rows behind the last bound hold anything.

    Args:
        inner: `[rows, 2 * width]`, contiguous: the gate, then what it lets through.
        weights: `[rows]`.
        bounds: `[experts + 1]` int32.
    """
    rows, columns = inner.shape[0], inner.shape[1] // 2
    out = inner.new_empty(rows, columns)
    _swiglu[(rows,)](
        inner, weights, bounds, out, bounds.shape[0] - 1, columns, COLUMNS=_columns_of(columns), num_warps=4
    )
    return out


def swiglu_backward(gradient: Tensor, inner: Tensor, weights: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `swiglu`'s first two arguments.

    Args:
        gradient: `[rows, width]`, contiguous.
        inner: See `swiglu`.
        weights: See `swiglu`.
        bounds: See `swiglu`.
    """
    rows, columns = gradient.shape
    of_inner, of_weights = torch.empty_like(inner), torch.empty_like(weights)
    sides = (gradient, inner, weights, bounds, of_inner, of_weights)
    _swiglu_backward[(rows,)](*sides, bounds.shape[0] - 1, columns, COLUMNS=_columns_of(columns), num_warps=4)
    return of_inner, of_weights


def _columns_of(columns: int) -> int:
    whole: int = triton.next_power_of_2(columns)
    return min(whole, MOST_COLUMNS)
