"""What encoders of images of any size have in common: pixels and `grid_thw` are what goes into a graph."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers, TensorSpec
from ...graphs.rows import write_rows
from ...offload import never_offload
from ...upstream_types import UpstreamModule
from ..adapter import RecordingKernels
from ..batch import VisionBatch
from ..fit import refuse_images
from ..guard import guarded_shape, write_guarded
from .layout import TokenPositions, first_frame_patches, position_interpolation


class GridProgram:
    """A region program without its `forward`. Buckets have the limits (frames, tokens of the largest frame).

    A `forward` passes something that every output depends on through `guard.poisoned`.

    Args:
        model: The vision model; has `patch_embed.proj` and `config`, unless `sizes` and `weight` take them elsewhere.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward; swaps in kernels that compute the same.
    """

    name = "vision_encoder"

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        self.model = model
        self._exact_below = exact_below
        self._kernels = kernels
        self.merge, self._patch_width = self.sizes(model.config)

    @staticmethod
    def sizes(config: Any) -> tuple[int, int]:
        """Return the patches along the side of an embedding, and the values of a patch."""
        width: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return config.spatial_merge_size, width

    def weight(self) -> Tensor:
        """Return the weight that patches are multiplied with; they enter a graph in its type."""
        weight: Tensor = self.model.patch_embed.proj.weight
        return weight

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.model,)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {
            "pixels": TensorSpec((bucket.tokens, self._patch_width), self.weight().dtype),
            "grid": TensorSpec(guarded_shape(bucket.limits[0]), torch.int64),
        }

    def size(self, batch: VisionBatch) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: VisionBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return refuse_images(batch.shape, self._exact_below, bucket)

    def load(self, buffers: Buffers, batch: VisionBatch) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["pixels"], batch.pixels.reshape(batch.tokens, -1))
        write_guarded(buffers["grid"], batch.grid.reshape(len(batch.rows), 3), batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        image = (1, self.merge, min(bucket.tokens, bucket.limits[1]) // self.merge**2 * self.merge)
        buffers["pixels"].zero_()
        write_guarded(buffers["grid"], torch.tensor([image]), (image,))

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self.modules())

    def differentiable_inputs(self, batch: VisionBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`: pixels take no gradient."""
        return ()


NEIGHBOURS = 4
# PyTorch scatters up to this many rows with a kernel that rounds in between, more with one that does not
# (aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda).
FEW_ROWS = 3072


@dataclass(frozen=True, slots=True)
class Scatter:
    """Which rows of the table get a share of the gradient of each patch of the images' first frames.

    Eager's rows are all first neighbours, then all second ones, without padding in between; so are these, with padding
    behind. All are `[4 * capacity]`.

    Attributes:
        row: int64, of the table; 0 for padding.
        patch: int64, in raster order.
        weight: Of the table's dtype; 0 for padding.
        few: bool, a scalar: whether eager takes PyTorch's kernel for few rows.
    """

    row: Tensor
    patch: Tensor
    weight: Tensor
    few: Tensor


def interpolate(table: Tensor, grid: Tensor, positions: TokenPositions) -> Tensor:
    """Return every token's position embedding, `[capacity, width]`; zero for padding.

    Args:
        table: `[side * side, width]` learned embeddings.
        grid: `[images, 3]` int64, unused rows zero.
        positions: Of the padded batch's tokens.
    """
    return learned(table, embeddings(table, positions), positions, scatter(table, grid, positions.patch.shape[0]))


def embeddings(table: Tensor, positions: TokenPositions) -> Tensor:
    """Return the values of `interpolate`, unknown to autograd."""
    with torch.no_grad():
        return embedded(lambda rows: functional.embedding(rows, table), _side(table), table.dtype, positions)


def embedded(embed: Callable[[Tensor], Tensor], side: int, dtype: torch.dtype, positions: TokenPositions) -> Tensor:
    """Return every token's position embedding by a module's own code, `[capacity, width]`; zero for padding.

    Args:
        embed: Takes `[neighbours, capacity]` int64 rows of the table.
        side: The table has `side * side` rows.
        dtype: Of its embeddings.
        positions: Of the padded batch's tokens.
    """
    indices, weights = position_interpolation(positions, side, dtype)
    terms = embed(indices) * weights[:, :, None]
    return terms[0] + terms[1] + terms[2] + terms[3]


def scatter(table: Tensor, grid: Tensor, capacity: int) -> Scatter:
    """Return where the backward of `interpolate` puts a gradient; it depends on the grid alone."""
    indices, weights = position_interpolation(first_frame_patches(grid, capacity), _side(table), table.dtype)
    count = (grid[:, 1] * grid[:, 2]).sum()
    place = torch.arange(NEIGHBOURS * capacity, device=grid.device)
    used = place < NEIGHBOURS * count
    neighbour, patch = place // count.clamp(min=1), place % count.clamp(min=1)
    neighbour = torch.where(used, neighbour, 0)
    row = torch.where(used, indices[neighbour, patch], 0)
    weight = torch.where(used, weights[neighbour, patch], 0)
    # Offloaded, they would leave from the main stream, which may not have waited for them.
    return Scatter(*map(never_offload, (row, patch, weight, NEIGHBOURS * count <= FEW_ROWS)))


def learned(table: Tensor, values: Tensor, positions: TokenPositions, places: Scatter | None) -> Tensor:
    """Return `values` with the gradient that the table gets through them.

    Args:
        table: `[side * side, width]`.
        values: `[capacity, width]`, of `embeddings`.
        positions: Of the padded batch's tokens.
        places: Of `scatter`; None where the table takes no gradient.
    """
    return values if places is None else _Learned.apply(table, values, positions, places)


class _Learned(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, values: Tensor, positions: TokenPositions, places: Scatter) -> Tensor:
        ctx.save_for_backward(positions.patch, positions.valid, places.row, places.patch, places.weight, places.few)
        ctx.rows = table.shape[0]
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        patch, valid, *places = ctx.saved_tensors
        summed = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
        summed.index_add_(0, patch, torch.where(valid[:, None], gradient, 0).float())
        return _scattered(summed.to(gradient.dtype), Scatter(*places), ctx.rows), None, None, None


def _scattered(gradient: Tensor, places: Scatter, rows: int) -> Tensor:
    """Return the table's gradient from that of the patches in raster order, `[capacity, width]`."""
    terms = gradient[places.patch] * places.weight[:, None]
    many: Tensor = torch.ops.aten.embedding_dense_backward(terms, places.row, rows, -1, False)
    if terms.shape[0] <= FEW_ROWS:
        return many
    few = torch.ops.aten.embedding_dense_backward(terms[:FEW_ROWS], places.row[:FEW_ROWS], rows, -1, False)
    return torch.where(places.few, few, many)


def _side(table: Tensor) -> int:
    return int(table.shape[0] ** 0.5)
