"""Zeros where no segment of a packed tensor lies."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
COLUMNS = 512


@triton.jit(do_not_specialize=["last", "rows"])
def _clear_padding(x_ptr, offsets_ptr, last, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    used = tl.load(offsets_ptr + last)
    first = tl.program_id(0) * ROWS
    if first + ROWS > used:
        row = first + tl.arange(0, ROWS)
        padding = (row >= used) & (row < rows)
        for start in tl.range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            place = row.to(tl.int64)[:, None] * columns + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), dtype=x_ptr.dtype.element_ty)
            tl.store(x_ptr + place, zeros, mask=padding[:, None] & (column < columns)[None, :])


def clear_padding(x: Tensor, offsets: Tensor) -> None:
    """Set the rows behind the last segment to zero, in place; nothing is read on the host.

    Args:
        x: `[tokens, ...]`, contiguous.
        offsets: `[segments + 1]` int32 `cu_seqlens`, on x's device.
    """
    rows = x.shape[0]
    columns = x.numel() // rows
    arguments = x, offsets, offsets.shape[0] - 1, rows, columns
    _clear_padding[(triton.cdiv(rows, ROWS),)](*arguments, ROWS=ROWS, COLUMNS=COLUMNS)
