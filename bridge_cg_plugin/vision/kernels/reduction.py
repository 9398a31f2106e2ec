"""Sums over the tokens of a matrix, in two passes of fixed order: the same input gives the same sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# One program's tile: wide loads, few registers a thread.
ROWS = 8
COLUMNS = 256
# Programs that keep a GPU busy. With more tiles a program adds up several, so that few partial sums are left.
BUSY = 1024
MOST_TILES = 16
SUM_COLUMNS = 64
SUM_ROWS = 32


@triton.jit
def _add_partials(partial_ptr, out_ptr, parts, columns, PARTS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr):
    column = tl.program_id(0) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    row = tl.arange(0, PARTS_BLOCK)
    total = tl.zeros((PARTS_BLOCK, COLUMNS_BLOCK), dtype=tl.float32)
    for start in tl.range(0, parts, PARTS_BLOCK):
        inside = (start + row < parts)[:, None] & (column < columns)[None, :]
        total += tl.load(partial_ptr + (start + row)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _column_partials(x_ptr, partial_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    target = partial_ptr + tl.program_id(0) * columns + column
    tl.store(target, tl.sum(total, axis=0), mask=column < columns)


def tiles_each(rows: int, columns: int) -> int:
    """Return how many tiles of `ROWS` rows a program adds up, a power of two."""
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    return 1 << min(max(tiles // BUSY, 1), MOST_TILES).bit_length() - 1


def row_programs(rows: int, tiles: int) -> int:
    """Return how many programs of so many tiles share the rows, which is how many partial sums they leave."""
    return triton.cdiv(rows, ROWS * tiles)


def add_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of `[parts, columns]` fp32 partial sums, rounded to `dtype`."""
    parts, columns = partials.shape
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    _add_partials[(triton.cdiv(columns, SUM_COLUMNS),)](
        partials, out, parts, columns, PARTS_BLOCK=SUM_ROWS, COLUMNS_BLOCK=SUM_COLUMNS
    )
    return out


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over rows of a contiguous `[rows, columns]` matrix, added in fp32, rounded to `dtype`."""
    rows, columns = x.shape
    tiles = tiles_each(rows, columns)
    partials = torch.empty((row_programs(rows, tiles), columns), dtype=torch.float32, device=x.device)
    grid = (partials.shape[0], triton.cdiv(columns, COLUMNS))
    _column_partials[grid](x, partials, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, TILES=tiles)
    return add_partials(partials, dtype)
