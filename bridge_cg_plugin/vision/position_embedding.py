"""Interpolated position embeddings with fixed shapes, forward and backward equal to eager's to the last bit.

Eager interpolates each image once in raster order, repeats that for the frames of a video and permutes it into merge
order. Its backward so sums over frames first, rounds, and then scatters into the table. The same roundings are made
here from the layout of a padded batch.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .layout import TokenPositions, first_frame_patches, position_interpolation

NEIGHBOURS = 4
# PyTorch scatters up to this many rows with a kernel that rounds in between, more with one that does not
# (aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda).
FEW_ROWS = 3072


def interpolate(table: Tensor, grid: Tensor, positions: TokenPositions) -> Tensor:
    """Return every token's position embedding, `[capacity, width]`; zero for padding.

    Args:
        table: `[side * side, width]` learned embeddings.
        grid: `[images, 3]` int64, unused rows zero.
        positions: Of the padded batch's tokens.
    """
    return _Interpolate.apply(table, grid, positions)


class _Interpolate(Function):
    @staticmethod
    def forward(ctx, table: Tensor, grid: Tensor, positions: TokenPositions) -> Tensor:
        indices, weights = position_interpolation(positions, _side(table), table.dtype)
        ctx.save_for_backward(grid, positions.patch, positions.valid)
        ctx.table = table
        terms = functional.embedding(indices, table) * weights[:, :, None]
        return terms[0] + terms[1] + terms[2] + terms[3]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        grid, patch, valid = ctx.saved_tensors
        table = ctx.table
        summed = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
        summed.index_add_(0, patch, torch.where(valid[:, None], gradient, 0).float())
        return _scatter(summed.to(gradient.dtype), grid, table), None, None


def _scatter(gradient: Tensor, grid: Tensor, table: Tensor) -> Tensor:
    """Return the table's gradient from that of the patches in raster order, `[capacity, width]`."""
    capacity, rows = gradient.shape[0], table.shape[0]
    indices, weights = position_interpolation(first_frame_patches(grid, capacity), _side(table), table.dtype)
    # Eager's rows are all first neighbours, then all second ones, without padding in between.
    count = (grid[:, 1] * grid[:, 2]).sum()
    place = torch.arange(NEIGHBOURS * capacity, device=grid.device)
    used = place < NEIGHBOURS * count
    neighbour, patch = place // count.clamp(min=1), place % count.clamp(min=1)
    neighbour = torch.where(used, neighbour, 0)
    index = torch.where(used, indices[neighbour, patch], 0)
    weight = torch.where(used, weights[neighbour, patch], 0)
    terms = gradient[patch] * weight[:, None]
    many = torch.ops.aten.embedding_dense_backward(terms, index, rows, -1, False)
    if terms.shape[0] <= FEW_ROWS:
        return many
    few = torch.ops.aten.embedding_dense_backward(terms[:FEW_ROWS], index[:FEW_ROWS], rows, -1, False)
    return torch.where(NEIGHBOURS * count <= FEW_ROWS, few, many)


def _side(table: Tensor) -> int:
    return int(table.shape[0] ** 0.5)
