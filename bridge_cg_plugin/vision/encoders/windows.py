"""From `grid_thw` to attention windows, on the device: the order of tokens, their coordinates, the windows' bounds.

Qwen2.5-VL's encoder cuts every frame into squares of `side` x `side` cells, a cell being the patches of one embedding,
and puts a frame's tokens in the order of its windows: band by band, window by window, row by row. At the right and the
bottom edge windows are smaller. All of that is a closed form of a token's place, so nothing is looked up on the host.
`grid` is as in `layout`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The order of a padded batch's cells by windows. Padding stays where it is.

    Attributes:
        order: `[cells]` int64, the cell that stands at each place, by its number in merge order.
        place: `[cells]` int64, where each cell stands: the inverse.
        positions: `[cells * merge**2, 2]` int64 patch (row, column) of the token at each place, 0 for padding.
    """

    order: Tensor
    place: Tensor
    positions: Tensor


def window_order(grid: Tensor, cells: int, merge: int, side: int) -> WindowOrder:
    """Return the order of a batch padded to so many cells.

    Args:
        grid: `[images, 3]` int64 (frames, height, width) in patches, unused rows zero.
        cells: Capacity in cells.
        merge: Patches along a cell's side.
        side: Cells along a window's side.
    """
    frames, heights, widths = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    counts = frames * heights * widths
    ends = counts.cumsum(0)
    number = torch.arange(cells, device=grid.device)
    valid = number < ends[-1]
    image = torch.searchsorted(ends, number, right=True).clamp_(max=grid.shape[0] - 1)
    height, width = (torch.where(valid, size[image], 1) for size in (heights, widths))
    inside = torch.where(valid, (number - (ends - counts)[image]) % (height * width), 0)
    start = number - inside
    row, column = _cell_at(inside, height, width, side)
    return WindowOrder(
        order=start + row * width + column,
        place=start + _place_of(inside // width, inside % width, height, width, side),
        positions=_patches(torch.where(valid, row, 0), torch.where(valid, column, 0), valid, merge),
    )


def _place_of(row: Tensor, column: Tensor, height: Tensor, width: Tensor, side: int) -> Tensor:
    """Return where a frame's cell stands in the order of windows."""
    band, window = row // side, column // side
    rows = torch.minimum(height - band * side, torch.full_like(height, side))
    columns = torch.minimum(width - window * side, torch.full_like(width, side))
    before = band * side * width + window * side * rows
    return before + row % side * columns + column % side


def _cell_at(place: Tensor, height: Tensor, width: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return row and column of the cell that stands at a place in the order of windows."""
    band, in_band = place // (side * width), place % (side * width)
    rows = torch.minimum(height - band * side, torch.full_like(height, side))
    window, in_window = in_band // (side * rows), in_band % (side * rows)
    columns = torch.minimum(width - window * side, torch.full_like(width, side))
    return band * side + in_window // columns, window * side + in_window % columns


def _patches(row: Tensor, column: Tensor, valid: Tensor, merge: int) -> Tensor:
    """Return the patches' coordinates of cells, `[cells * merge**2, 2]`; 0 where not `valid`."""
    inside = torch.arange(merge * merge, device=row.device)
    rows = row[:, None] * merge + inside // merge
    columns = column[:, None] * merge + inside % merge
    return torch.where(valid[:, None, None], torch.stack((rows, columns), dim=-1), 0).view(-1, 2)


def window_offsets(grid: Tensor, windows: int, merge: int, side: int) -> Tensor:
    """Return `cu_seqlens` of windows in tokens, `[windows + 1]` int32, with windows of no length after the last.

    Args:
        grid: As in `window_order`.
        windows: How many there are at most; see `most_windows`.
        merge: Patches along a cell's side.
        side: Cells along a window's side.
    """
    heights, widths = grid[:, 1] // merge, grid[:, 2] // merge
    across, per_frame = _ceil(widths, side), _ceil(heights, side) * _ceil(widths, side)
    counts = grid[:, 0] * per_frame
    ends = counts.cumsum(0)
    number = torch.arange(windows, device=grid.device)
    image = torch.searchsorted(ends, number, right=True).clamp_(max=grid.shape[0] - 1)
    inside = (number - (ends - counts)[image]) % per_frame[image].clamp(min=1)
    band, window = inside // across[image].clamp(min=1), inside % across[image].clamp(min=1)
    rows, columns = (
        (sizes[image] - index * side).clamp(max=side) for sizes, index in ((heights, band), (widths, window))
    )
    lengths = torch.where(number < ends[-1], rows * columns * merge**2, 0)
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _ceil(sizes: Tensor, side: int) -> Tensor:
    return (sizes + side - 1) // side


def most_windows(cells: int, frames: int, side: int) -> int:
    """Return how many windows so many frames of so many cells together can have.

    A frame of h x w cells has ceil(h / side) * ceil(w / side) windows, at most (h * w + side - 1) / side: a strip one
    cell wide has most.
    """
    return min((cells + (side - 1) * frames) // side, cells)


def permuted(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Return `rows[order]`; `place` is the inverse, by which gradients go back."""
    out: Tensor = _Permuted.apply(rows, order, place)
    return out


class _Permuted(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradient.index_select(0, place), None, None
