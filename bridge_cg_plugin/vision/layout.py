"""From `grid_thw` to token positions, attention segments, rotary angles and position embeddings, on the device.

Everything here has a fixed output shape and reads nothing on the host, so it can be part of a graph. `grid` is
`[images, 3]` int64 with (frames, height, width) in patches; unused rows are zero. Tokens of a frame come in merge
order: blocks of `merge` x `merge` patches, row by row, patches of a block row by row (Qwen2-VL's image processor).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where each token of a padded batch lies in its frame.

    Attributes:
        valid: `[capacity]` bool, False for padding.
        row, column: `[capacity]` int64 patch coordinates inside the frame, 0 for padding.
        height, width: `[capacity]` int64 size of the token's frame in patches, 1 for padding.
        patch: `[capacity]` int64 place among the patches of all images' first frames in raster order; frames of a
            video share theirs. 0 for padding.
    """

    valid: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor
    patch: Tensor


def owners(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number parts one after another, `counts` of each owner; behind the last there is padding.

    Args:
        counts: `[owners]` int64.
        capacity: Parts at most.

    Returns:
        For each part, `[capacity]`: its owner, the last one for padding; its number there; whether there is one.
    """
    ends = counts.cumsum(0)
    number = torch.arange(capacity, device=counts.device)
    owner = torch.searchsorted(ends, number, right=True).clamp_(max=counts.shape[0] - 1)
    return owner, number - (ends - counts)[owner], number < ends[-1]


def token_positions(grid: Tensor, capacity: int, merge: int) -> TokenPositions:
    """Locate every token of a batch padded to `capacity` tokens."""
    image, token, valid = owners(grid.prod(dim=1), capacity)
    height = torch.where(valid, grid[image, 1], 1)
    width = torch.where(valid, grid[image, 2], 1)
    in_frame = token % (height * width)
    if merge == 1:
        row, column = in_frame // width, in_frame % width
    else:
        block, inside = in_frame // (merge * merge), in_frame % (merge * merge)
        blocks_per_row = (width // merge).clamp_(min=1)
        row = block // blocks_per_row * merge + inside // merge
        column = block % blocks_per_row * merge + inside % merge
    areas = grid[:, 1] * grid[:, 2]
    patch = (areas.cumsum(0) - areas)[image] + row * width + column
    row, column, patch = (torch.where(valid, t, 0) for t in (row, column, patch))
    return TokenPositions(valid, row, column, height, width, patch)


def first_frame_patches(grid: Tensor, capacity: int) -> TokenPositions:
    """Locate the patches of all images' first frames in raster order, padded to `capacity`."""
    return token_positions(torch.cat((grid[:, :1].clamp(max=1), grid[:, 1:]), dim=1), capacity, merge=1)


def segment_offsets(grid: Tensor, segments: int) -> Tensor:
    """Return `cu_seqlens`, `[segments + 1]` int32: one segment per frame, zero-length segments after the last.

    Padding tokens lie behind the last offset, outside every segment.
    """
    image, _, exists = owners(grid[:, 0], segments)
    return offsets_of(torch.where(exists, grid[image, 1] * grid[image, 2], 0))


def offsets_of(lengths: Tensor) -> Tensor:
    """Return `cu_seqlens` of segments of these lengths, int32."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def rotary_angles(positions: TokenPositions, inverse_frequencies: Tensor) -> Tensor:
    """Return angles `[capacity, 1, 1, 4 * len(inverse_frequencies)]` fp32: (row, column), twice."""
    rows = positions.row.to(inverse_frequencies.dtype)[:, None] * inverse_frequencies
    columns = positions.column.to(inverse_frequencies.dtype)[:, None] * inverse_frequencies
    return torch.cat((rows, columns, rows, columns), dim=1)[:, None, None, :]


def position_interpolation(positions: TokenPositions, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the four neighbours of every token in a `side` x `side` table and their bilinear weights.

    Returns:
        indices `[4, capacity]` int64 and weights `[4, capacity]` of `dtype`, zero for padding.
    """
    row_floor, row_ceil, row_part = _axis(positions.row, positions.height, side)
    column_floor, column_ceil, column_part = _axis(positions.column, positions.width, side)
    indices = torch.stack(
        (
            row_floor * side + column_floor,
            row_floor * side + column_ceil,
            row_ceil * side + column_floor,
            row_ceil * side + column_ceil,
        )
    )
    weights = torch.stack(
        (
            (1 - row_part) * (1 - column_part),
            (1 - row_part) * column_part,
            row_part * (1 - column_part),
            row_part * column_part,
        )
    )
    return indices, torch.where(positions.valid, weights, 0).to(dtype)


def _axis(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    coordinate = linspace_at(index, count, side - 1)
    floor = coordinate.long()
    return floor, (floor + 1).clamp_(max=side - 1), coordinate - floor


def linspace_at(index: Tensor, count: Tensor, end: int) -> Tensor:
    """Return `torch.linspace(0, end, count)[index]` element-wise, in fp32 and to the last bit.

    PyTorch steps from the start in the first half and back from the end in the second, with a fused multiply-add; a
    product of two fp32 numbers is exact in fp64, so rounding once from there gives the same value.
    """
    step = (torch.full_like(count, end).float() / (count - 1).clamp(min=1)).double()
    from_start = step * index
    from_end = end - step * (count - 1 - index)
    return torch.where(index < count // 2, from_start, torch.where(count > 1, from_end, 0)).float()


def window_order(grid: Tensor, cells: int, merge: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order by windows of a batch padded to so many cells. Padding stays where it is.

    Args:
        grid: `[images, 3]` int64 (frames, height, width) in patches, unused rows zero.
        cells: Capacity in cells.
        merge: Patches along a cell's side.
        side: Cells along a window's side.

    Returns:
        `[cells]` int64, the cell that stands at each place, by its number in merge order; `[cells]` int64, where each
        cell stands; `[cells * merge**2, 2]` int64 patch (row, column) of the token at each place, 0 for padding.
    """
    frames, heights, widths = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    image, number, valid = owners(frames * heights * widths, cells)
    height, width = (torch.where(valid, size[image], 1) for size in (heights, widths))
    inside = torch.where(valid, number % (height * width), 0)
    cell = torch.arange(cells, device=grid.device)
    row, column = inside // width, inside % width
    place = cell - inside + _place_of(row, column, height, width, side)
    order = torch.empty_like(place).scatter_(0, place, cell)
    return order, place, _patches(row[order], column[order], valid, merge)


def _place_of(row: Tensor, column: Tensor, height: Tensor, width: Tensor, side: int) -> Tensor:
    """Return where a frame's cell stands in the order of windows."""
    band, window = row // side, column // side
    rows = torch.minimum(height - band * side, torch.full_like(height, side))
    columns = torch.minimum(width - window * side, torch.full_like(width, side))
    before = band * side * width + window * side * rows
    return before + row % side * columns + column % side


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
    image, number, exists = owners(grid[:, 0] * per_frame, windows)
    inside = number % per_frame[image].clamp(min=1)
    band, window = inside // across[image].clamp(min=1), inside % across[image].clamp(min=1)
    rows, columns = (
        (sizes[image] - index * side).clamp(max=side) for sizes, index in ((heights, band), (widths, window))
    )
    return offsets_of(torch.where(exists, rows * columns * merge**2, 0))


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
