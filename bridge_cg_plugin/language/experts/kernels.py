"""Triton kernels of experts: rows times their expert's weight, weight gradients, sums by token.

Experts' weights and gradients are found by their distance from the first, so parameters stay where training has them
and nothing is stacked. How many rows an expert has is read on the device; a launch has room for any division of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import Table

# Columns that a block takes at once where rows are added up.
COMBINED_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided.

    Attributes:
        rows: Rows of a tile of the result.
        columns: Columns of it.
        depth: Elements summed at once.
        warps: Warps of a block.
        stages: Loads under way.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _expert_of(bounds_ptr, experts, tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return a tile's expert, its first row and the expert's end; no expert is `EXPERTS`."""
    number = tl.arange(0, EXPERTS)
    first = tl.load(bounds_ptr + number, mask=number < experts, other=0)
    end = tl.load(bounds_ptr + number + 1, mask=number < experts, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    its = number == expert
    before = tl.sum(tl.where(its, ends - tiles, 0), 0)
    row = tl.sum(tl.where(its, first, 0), 0) + (tile - before) * ROWS
    return expert, row, tl.sum(tl.where(its, end, 0), 0)


@triton.jit
def _matrix(first_ptr, distances_ptr, expert, VECTOR: tl.constexpr):
    """Return where an expert's matrix begins, `VECTOR` elements a multiple of the distance."""
    distance = tl.load(distances_ptr + expert)
    # The compiler loads whole vectors only where it sees that it may.
    return first_ptr + (distance // VECTOR) * VECTOR


@triton.jit
def _multiply(
    x_ptr,
    tokens_ptr,
    weight_ptr,
    distances_ptr,
    bounds_ptr,
    out_ptr,
    experts,
    columns,
    depth,
    GATHERED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // across
    expert, first, end = _expert_of(bounds_ptr, experts, tile, ROWS, EXPERTS)
    if expert < experts:
        its_ptr = _matrix(weight_ptr, distances_ptr, expert, VECTOR)
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        # Rows beyond the end repeat the last one: they are loaded and not stored.
        source = tl.minimum(row, end - 1)
        if GATHERED:
            source = tl.load(tokens_ptr + source)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * depth + inner[None, :]
        if TRANSPOSED:  # [depth, columns]
            weight_ptrs = its_ptr + inner[:, None] * columns + column[None, :]
            step = DEPTH * columns
        else:  # [columns, depth]
            weight_ptrs = its_ptr + column[None, :] * depth + inner[:, None]
            step = DEPTH
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(0, depth, DEPTH):
            if WHOLE:
                x = tl.load(x_ptrs)
                weight = tl.load(weight_ptrs)
            else:
                inside = start + inner < depth
                x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
                weight = tl.load(weight_ptrs, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
            x_ptrs += DEPTH
            weight_ptrs += step
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        stored = (row < end)[:, None]
        if not WHOLE:
            stored = stored & (column < columns)[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _weight_gradients(
    gradient_ptr,
    gradient_tokens_ptr,
    x_ptr,
    x_tokens_ptr,
    bounds_ptr,
    sum_ptr,
    distances_ptr,
    rows,
    columns,
    GRADIENT_GATHERED: tl.constexpr,
    X_GATHERED: tl.constexpr,
    ADD: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    if (end > begin) | (not ADD):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(begin, end, DEPTH):
            summed = start + tl.arange(0, DEPTH)
            inside = summed < end
            of_gradient = tl.minimum(summed, end - 1)
            of_x = of_gradient
            if GRADIENT_GATHERED:
                of_gradient = tl.load(gradient_tokens_ptr + of_gradient)
            if X_GATHERED:
                of_x = tl.load(x_tokens_ptr + of_x)
            gradient_ptrs = gradient_ptr + of_gradient.to(tl.int64)[:, None] * rows + row[None, :]
            x_ptrs = x_ptr + of_x.to(tl.int64)[:, None] * columns + column[None, :]
            # Behind the expert's end one side is zero, the other repeats the last row.
            if WHOLE:
                gradient = tl.load(gradient_ptrs, mask=inside[:, None], other=0.0)
                x = tl.load(x_ptrs)
            else:
                gradient = tl.load(gradient_ptrs, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
                x = tl.load(x_ptrs, mask=(column < columns)[None, :], other=0.0)
            total = tl.dot(tl.trans(gradient), x, total, input_precision=PRECISION)
        out_ptrs = _matrix(sum_ptr, distances_ptr, expert, VECTOR) + row[:, None] * columns + column[None, :]
        if WHOLE:
            if ADD:
                total += tl.load(out_ptrs).to(tl.float32)
            tl.store(out_ptrs, total.to(sum_ptr.dtype.element_ty))
        else:
            stored = (row < rows)[:, None] & (column < columns)[None, :]
            if ADD:
                total += tl.load(out_ptrs, mask=stored, other=0.0).to(tl.float32)
            tl.store(out_ptrs, total.to(sum_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _combine(values_ptr, places_ptr, out_ptr, columns, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for index in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + index).to(tl.int64)
        total += tl.load(values_ptr + place * columns + column, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * columns + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor,
    tokens: Tensor | None,
    table: Table,
    shape: Sequence[int],
    bounds: Tensor,
    transposed: bool,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return rows times their expert's weight; see `products.multiply`.

    Args:
        x: `[rows, width]` or `[tokens, width]`, contiguous.
        tokens: `[rows]` int32 or None.
        table: Of the weights, of x's dtype.
        shape: `(out, in)` of a weight.
        bounds: `[experts + 1]` int32.
        transposed: Whether x is `out` wide.
        tiling: None is one that fits.
    """
    count, experts = x.shape[0] if tokens is None else tokens.shape[0], table.distances.shape[0]
    depth, columns = shape if transposed else (shape[1], shape[0])
    out = x.new_empty(count, columns)
    tiling = tiling or tiling_of(x.dtype, count // experts)
    # Every expert may end with a tile that is not full.
    tiles = triton.cdiv(count, tiling.rows) + experts - 1
    _multiply[(tiles * triton.cdiv(columns, tiling.columns),)](
        x,
        x if tokens is None else tokens,
        table.first,
        table.distances,
        bounds,
        out,
        experts,
        columns,
        depth,
        GATHERED=tokens is not None,
        TRANSPOSED=transposed,
        VECTOR=table.vector,
        WHOLE=depth % tiling.depth == 0 and columns % tiling.columns == 0,
        PRECISION=_precision(x.dtype),
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def weight_gradients(
    gradient: Tensor,
    gradient_tokens: Tensor | None,
    x: Tensor,
    x_tokens: Tensor | None,
    bounds: Tensor,
    table: Table,
    add: bool,
    tiling: Tiling | None = None,
) -> None:
    """Write every expert's weight gradient to its place, or add it there; see `products.add_weight_gradients`.

    Args:
        gradient: `[rows, out]` or `[tokens, out]`, contiguous.
        gradient_tokens: `[rows]` int32 or None.
        x: `[rows, in]` or `[tokens, in]`, contiguous.
        x_tokens: `[rows]` int32 or None.
        bounds: `[experts + 1]` int32.
        table: Of `[out, in]` each.
        add: Whether what is there counts; an expert without rows then stays as it is.
        tiling: None is one that fits.
    """
    rows, columns, experts = gradient.shape[1], x.shape[1], table.distances.shape[0]
    tiling = tiling or tiling_of_gradients(x.dtype)
    tiles = triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns)
    _weight_gradients[(experts * tiles,)](
        gradient,
        gradient if gradient_tokens is None else gradient_tokens,
        x,
        x if x_tokens is None else x_tokens,
        bounds,
        table.first,
        table.distances,
        rows,
        columns,
        GRADIENT_GATHERED=gradient_tokens is not None,
        X_GATHERED=x_tokens is not None,
        ADD=add,
        VECTOR=table.vector,
        WHOLE=rows % tiling.rows == 0 and columns % tiling.columns == 0,
        PRECISION=_precision(x.dtype),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def combine(values: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows, `[tokens, width]` of a type; see `products.combine`."""
    (tokens, top_k), columns = places.shape, values.shape[1]
    out = values.new_empty(tokens, columns, dtype=dtype)
    _combine[(tokens, triton.cdiv(columns, COMBINED_COLUMNS))](
        values, places, out, columns, TOP_K=top_k, COLUMNS=COMBINED_COLUMNS, num_warps=4
    )
    return out


def tiling_of(dtype: torch.dtype, usual: int) -> Tiling:
    """Return the tiling of a product.

    Args:
        dtype: Of both sides.
        usual: Rows of an expert if all had as many.
    """
    if dtype is torch.float32:
        return Tiling(64, 64, 32, 4, 2)
    return Tiling(128, 256, 64, 8, 4) if usual >= 256 else Tiling(128, 128, 64, 4, 4)


def tiling_of_gradients(dtype: torch.dtype) -> Tiling:
    """Return the tiling of weight gradients."""
    return Tiling(64, 64, 32, 4, 2) if dtype is torch.float32 else Tiling(128, 128, 64, 4, 4)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"  # of no effect on 16 bits
