"""What encoders of images of any size have in common: pixels and `grid_thw` are what goes into a graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..attention_bounds import scanned_limits
from ..graphs.buckets import Bucket
from ..graphs.program import Buffers, TensorSpec
from ..graphs.recordings.streams import run_on_side_stream
from ..graphs.rows import write_rows
from ..offload import never_offload
from .batch import GRID_DTYPES, BatchError, EncoderBatch, HostGrids, check_device, patches_misfit, shape_of
from .encoder import Encoder
from .guard import guarded_shape, write_guarded
from .layout import TokenPositions, first_frame_patches, position_interpolation


class GridEncoder(Encoder):
    """See `Encoder`. Buckets have the limits (frames, tokens of the largest frame).

    A `forward` passes something that every output depends on through `guard.poisoned`. The model has
    `patch_embed.proj` and `config`, unless `prepare` and `weight` take them elsewhere.

    Attributes:
        merge: Patches along the side of an embedding.
        patch: Channels, frames, height and width of a patch; frames only where a patch has them.
    """

    merge: int
    patch: tuple[int, ...]

    def prepare(self) -> None:
        """See `Encoder`."""
        config = self.model.config
        self.merge, side = config.spatial_merge_size, config.patch_size
        self.unit, self.patch = self.merge**2, (config.in_channels, config.temporal_patch_size, side, side)

    def weight(self) -> Tensor:
        """Return the weight that patches are multiplied with; they enter a graph in its type."""
        weight: Tensor = self.model.patch_embed.proj.weight
        return weight

    def patches(self, grids: HostGrids, pixels: Tensor, grid: Tensor) -> tuple[EncoderBatch, str | None]:
        """Return the microbatch of a call, pixels one row a patch, and what is wrong with it; nothing is copied.

        Args:
            grids: Host copies of grids.
            pixels: Patches in any shape whose memory can be viewed as `[tokens, *patch]`.
            grid: `[images, 3]` int32 or int64.

        Raises:
            BatchError: No encoder takes pixels or a grid of this kind.
        """
        if not isinstance(grid, Tensor) or grid.dim() != 2 or grid.shape[1] != 3 or grid.dtype not in GRID_DTYPES:
            found = f"{grid.dtype} {tuple(grid.shape)}" if isinstance(grid, Tensor) else type(grid).__name__
            raise BatchError(f"grid_thw is {found}, the encoder takes an int32 or int64 tensor (images, 3)")
        check_device(pixels, self.weight().device)
        if pixels.dim() != 2 or pixels.shape[1] != math.prod(self.patch):
            try:
                pixels = pixels.view(-1, *self.patch)
            except RuntimeError as error:
                raise BatchError(
                    f"pixel_values has shape {tuple(pixels.shape)} and strides {pixels.stride()}, the encoder takes "
                    f"what can be viewed as (tokens, {', '.join(map(str, self.patch))}); use the model's processor, or "
                    "call contiguous()"
                ) from error
        rows = grids.lookup(grid)
        batch = EncoderBatch(pixels, rows, shape_of(rows)._replace(tokens=pixels.shape[0]), grid)
        return batch, patches_misfit(batch, self.merge)

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`: kernels look at every frame as if it were the largest, and leave where it is not."""
        return [*scanned_limits(capacity, frames)]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {
            "pixels": TensorSpec((bucket.tokens, math.prod(self.patch)), self.weight().dtype),
            "grid": TensorSpec(guarded_shape(bucket.limits[0]), torch.int64),
        }

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        assert batch.sizes is not None
        write_rows(buffers["pixels"], batch.pixels.reshape(batch.tokens, -1))
        write_guarded(buffers["grid"], batch.sizes.reshape(len(batch.rows), 3), batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        image = (1, self.merge, min(bucket.tokens, bucket.limits[1]) // self.merge**2 * self.merge)
        write_guarded(buffers["grid"], torch.tensor([image]), (image,))


NEIGHBOURS = 4
# PyTorch scatters up to this many rows with a kernel that rounds in between, more with one that does not
# (aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda).
FEW_ROWS = 3072


def interpolate(
    table: Tensor, grid: Tensor, positions: TokenPositions, guard: Callable[[Tensor], Tensor] = lambda values: values
) -> Tensor:
    """Return every token's position embedding, `[capacity, width]`; zero for padding.

    Args:
        table: `[side * side, width]` learned embeddings.
        grid: `[images, 3]` int64, unused rows zero.
        positions: Of the padded batch's tokens.
        guard: Called with what every value is multiplied by.
    """
    side = int(table.shape[0] ** 0.5)
    with torch.no_grad():
        values = embedded(lambda rows: functional.embedding(rows, table), side, table.dtype, positions, guard)
    if not (torch.is_grad_enabled() and table.requires_grad):
        return values
    capacity = positions.patch.shape[0]
    places = run_on_side_stream(lambda: _scatter(grid, side, table.dtype, capacity), grid)
    learned: Tensor = _Learned.apply(table, values, positions, places)
    return learned


def embedded(
    embed: Callable[[Tensor], Tensor],
    side: int,
    dtype: torch.dtype,
    positions: TokenPositions,
    guard: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return every token's position embedding by a module's own code, `[capacity, width]`; zero for padding.

    Args:
        embed: Takes `[neighbours, capacity]` int64 rows of the table.
        side: The table has `side * side` rows.
        dtype: Of its embeddings.
        positions: Of the padded batch's tokens.
        guard: See `interpolate`.
    """
    indices, weights = position_interpolation(positions, side, dtype)
    terms = embed(indices) * guard(weights)[:, :, None]
    return terms[0] + terms[1] + terms[2] + terms[3]


def _scatter(grid: Tensor, side: int, dtype: torch.dtype, capacity: int) -> tuple[Tensor, ...]:
    """Return which rows of the table get a share of the gradient of each patch of the images' first frames.

    Eager's rows are all first neighbours, then all second ones, without padding in between; so are these, with padding
    behind.

    Returns:
        `[4 * capacity]` each: rows of the table, int64, 0 for padding; patches in raster order, int64; weights of the
        table's dtype, 0 for padding. A scalar, bool: whether eager takes PyTorch's kernel for few rows.
    """
    indices, weights = position_interpolation(first_frame_patches(grid, capacity), side, dtype)
    count = (grid[:, 1] * grid[:, 2]).sum()
    place = torch.arange(NEIGHBOURS * capacity, device=grid.device)
    used = place < NEIGHBOURS * count
    neighbour, patch = place // count.clamp(min=1), place % count.clamp(min=1)
    neighbour = torch.where(used, neighbour, 0)
    row = torch.where(used, indices[neighbour, patch], 0)
    weight = torch.where(used, weights[neighbour, patch], 0)
    # Offloaded, they would leave from the main stream, which may not have waited for them.
    return tuple(map(never_offload, (row, patch, weight, NEIGHBOURS * count <= FEW_ROWS)))


class _Learned(Function):
    """Values that do not know where they come from, with the gradient that the table gets through them."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, values: Tensor, positions: TokenPositions, places: tuple[Tensor, ...]
    ) -> Tensor:
        ctx.save_for_backward(positions.patch, positions.valid, *places)
        ctx.rows = table.shape[0]
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        patch, valid, *places = ctx.saved_tensors
        summed = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
        summed.index_add_(0, patch, torch.where(valid[:, None], gradient, 0).float())
        return _scattered(summed.to(gradient.dtype), places, ctx.rows), None, None, None


def _scattered(gradient: Tensor, places: Sequence[Tensor], rows: int) -> Tensor:
    """Return the table's gradient from that of the patches in raster order, `[capacity, width]`."""
    row, patch, weight, is_few = places
    terms = gradient[patch] * weight[:, None]
    many: Tensor = torch.ops.aten.embedding_dense_backward(terms, row, rows, -1, False)
    if terms.shape[0] <= FEW_ROWS:
        return many
    few = torch.ops.aten.embedding_dense_backward(terms[:FEW_ROWS], row[:FEW_ROWS], rows, -1, False)
    return torch.where(is_few, few, many)
