"""What encoders of images of any size have in common: pixels and `grid_thw` are what goes into a graph."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..attention_bounds import scanned_limits
from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.program import Buffers, TensorSpec
from ..graphs.rows import write_rows
from ..upstream_types import UpstreamModule
from .batch import EncoderBatch, HostGrids, patch_shape, patches_misfit, read_patches
from .encoder import Encoder, RecordingKernels
from .fit import refuse_images
from .guard import guarded_shape, write_guarded
from .layout import TokenPositions, position_interpolation


class GridEncoder(Encoder):
    """See `Encoder`. Buckets have the limits (frames, tokens of the largest frame).

    A `forward` passes something that every output depends on through `guard.poisoned`. The model has
    `patch_embed.proj` and `config`, unless `sizes` and `weight` take them elsewhere.

    Attributes:
        merge: Patches along the side of an embedding.
    """

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(model, exact_below, kernels)
        self.merge, self._patch_width = self.sizes(model.config)
        self.unit = self.merge**2

    @staticmethod
    def sizes(config: Any) -> tuple[int, int]:
        """Return the patches along the side of an embedding, and the values of a patch."""
        width: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return config.spatial_merge_size, width

    def weight(self) -> Tensor:
        """Return the weight that patches are multiplied with; they enter a graph in its type."""
        weight: Tensor = self.model.patch_embed.proj.weight
        return weight

    def patches(self, grids: HostGrids, pixels: Tensor, grid: Tensor) -> tuple[EncoderBatch, str | None]:
        """Return the microbatch of a call, and what is wrong with it; see `read_patches`."""
        batch = read_patches(grids, pixels, grid, patch_shape(self.model.config), self.weight().device)
        return batch, patches_misfit(batch, self.merge)

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`: kernels look at every frame as if it were the largest, and leave where it is not."""
        return [*scanned_limits(capacity, frames)]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {
            "pixels": TensorSpec((bucket.tokens, self._patch_width), self.weight().dtype),
            "grid": TensorSpec(guarded_shape(bucket.limits[0]), torch.int64),
        }

    def refuse(self, batch: EncoderBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return refuse_images(batch.shape, self.exact_below, bucket)

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

    def output_rows(self, batch: EncoderBatch) -> tuple[int, ...]:
        """See `RegionProgram`: embeddings, then patches."""
        return batch.tokens // self.merge**2, batch.tokens


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
        guard: Called with what every value is multiplied by.
    """
    indices, weights = position_interpolation(positions, side, dtype)
    terms = embed(indices) * guard(weights)[:, :, None]
    return terms[0] + terms[1] + terms[2] + terms[3]
