"""Sums over the tokens of a matrix, in two passes of fixed order: the same input gives the same sum."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ...graphs.instance import has_parameters, modules_where
from ...graphs.recordings.streams import run_on_side_stream
from ...graphs.replays.gradients import SMALL

# Programs that keep a GPU busy. With more tiles a program adds up several, so that few partial sums are left.
BUSY = 1024
SUM_COLUMNS = 64
SUM_ROWS = 32
# Deferred sums that one kernel adds up: few launches, and partial sums that are still in the cache.
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """How programs share a matrix whose rows they add up.

    Attributes:
        rows, columns: A program's tile.
        most: Tiles, one below the other, that a program adds up at most.
    """

    rows: int
    columns: int
    most: int

    def tiles_each(self, rows: int, columns: int) -> int:
        """Return how many tiles a program adds up, a power of two: few where programs are few, or a GPU would idle."""
        tiles: int = triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)
        return 1 << min(max(tiles // BUSY, 1), self.most).bit_length() - 1

    def grid(self, rows: int, columns: int, tiles: int = 1) -> tuple[int, int]:
        """Return the programs of so many tiles each, over rows and columns; those over rows leave partial sums."""
        return triton.cdiv(rows, self.rows * tiles), triton.cdiv(columns, self.columns)


# Wide loads, few registers a thread.
WIDE = Tiling(rows=8, columns=256, most=16)


# How many there are only bounds loops and masks: one kernel serves all.
@triton.jit(do_not_specialize=["parts"])
def _add_partials(partial_ptr, out_ptr, parts, columns, PARTS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr):
    column = tl.program_id(0) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    first = tl.program_id(1).to(tl.int64) * parts
    row = tl.arange(0, PARTS_BLOCK)
    total = tl.zeros((PARTS_BLOCK, COLUMNS_BLOCK), dtype=tl.float32)
    for start in tl.range(0, parts, PARTS_BLOCK):
        inside = (start + row < parts)[:, None] & (column < columns)[None, :]
        place = (first + start + row)[:, None] * columns + column[None, :]
        total += tl.load(partial_ptr + place, mask=inside, other=0.0)
    target = out_ptr + tl.program_id(1) * columns + column
    tl.store(target, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
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


def add_partials(partials: Tensor, out: Tensor) -> None:
    """Write the sums of `[matrices, parts, columns]` fp32 partial sums over their parts to `[matrices, columns]`."""
    matrices, parts, columns = partials.shape
    grid = triton.cdiv(columns, SUM_COLUMNS), matrices
    _add_partials[grid](partials, out, parts, columns, PARTS_BLOCK=SUM_ROWS, COLUMNS_BLOCK=SUM_COLUMNS)


class DeferredSums:
    """Sums whose partial sums are added up later, several in one kernel.

    Args:
        modules: Roots of the modules whose parameters' gradients may wait.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        held = modules_where(has_parameters, modules)
        self._places = Counter(id(p) for module in held for p in module._parameters.values())
        self._uses: Counter[int] = Counter()
        # Room for the partial sums of `TOGETHER` matrices of one shape, for their sums, and how many are there.
        self._blocks: dict[tuple[Any, ...], tuple[Tensor, Tensor, int]] = {}

    def note_use(self, parameter: Tensor) -> Callable[[], bool]:
        """Count a use of a parameter in a forward; returns a function: whether its gradient's sum can wait.

        It can where nothing reads the gradient before `add`: the parameter is a leaf that one module has and uses
        once, so that autograd adds nothing to its gradient, and it is small enough for `add_together`.
        """
        key = id(parameter)
        fits = parameter.is_leaf and self._places[key] == 1 and parameter.numel() <= SMALL
        self._uses[key] += 1
        return lambda: fits and self._uses[key] == 1

    def place(self, parts: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where partial sums `[parts, columns]` go, in fp32, and the sum `[columns]` that `add` will fill."""
        key = parts, columns, dtype, device
        block = self._blocks.get(key)
        if block is not None and block[2] < TOGETHER:
            partials, totals, used = block
        else:
            if block is not None:
                _add_aside(*block[:2])
            partials = torch.empty((TOGETHER, parts, columns), dtype=torch.float32, device=device)
            totals, used = torch.empty((TOGETHER, columns), dtype=dtype, device=device), 0
        self._blocks[key] = partials, totals, used + 1
        return partials[used], totals[used]

    def add(self) -> None:
        """Fill all sums that are left."""
        for partials, totals, used in self._blocks.values():
            _add_aside(partials[:used], totals)
        self._blocks = {}


def _add_aside(partials: Tensor, totals: Tensor) -> None:
    run_on_side_stream(lambda: add_partials(partials, totals), partials, totals)


# Set while work is recorded. Autograd calls a backward in a thread of its own, so a context variable would not do.
_deferred: DeferredSums | None = None


@contextmanager
def deferred_sums(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let sums of these modules' gradients wait for one another inside; at the end all are there."""
    global _deferred
    before, _deferred = _deferred, DeferredSums(modules)
    try:
        yield
        _deferred.add()
    finally:
        _deferred = before


def may_wait(parameter: Tensor) -> Callable[[], bool]:
    """Note a use of a parameter in a forward; returns what its backward asks: whether the gradient's sum can wait."""
    return (lambda: False) if _deferred is None else _deferred.note_use(parameter)


def partial_sums(
    parts: int, columns: int, dtype: torch.dtype, device: torch.device, deferred: bool
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return where kernels write the parts of a sum over rows, and what returns the sum once they did.

    Args:
        parts: Partial sums.
        columns: Width.
        dtype: Of the sum.
        device: Where it is computed.
        deferred: Whether the sum may be filled as late as at the end of `deferred_sums`.

    Returns:
        `[parts, columns]` fp32, and a function that returns `[columns]`.
    """
    if deferred and _deferred is not None:
        partials, waiting = _deferred.place(parts, columns, dtype, device)
        return partials, lambda: waiting
    partials = torch.empty((parts, columns), dtype=torch.float32, device=device)

    def added() -> Tensor:
        total = torch.empty(columns, dtype=dtype, device=device)
        add_partials(partials[None], total)
        return total

    return partials, added


def column_sum(x: Tensor, dtype: torch.dtype, deferred: bool = False) -> Tensor:
    """Return the sum over rows of a contiguous `[rows, columns]` matrix, added in fp32, rounded to `dtype`.

    Args:
        x: The matrix.
        dtype: Of the result.
        deferred: See `partial_sums`.
    """
    rows, columns = x.shape
    tiles = WIDE.tiles_each(rows, columns)
    grid = WIDE.grid(rows, columns, tiles)
    partials, total = partial_sums(grid[0], columns, dtype, x.device, deferred)
    constants = {"ROWS": WIDE.rows, "COLUMNS": WIDE.columns, "TILES": tiles}
    _column_partials[grid](x, partials, rows, columns, **constants)
    return total()
