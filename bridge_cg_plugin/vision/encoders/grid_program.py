"""What encoders of images of any size have in common: pixels and `grid_thw` are what goes into a graph."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers, TensorSpec
from ...graphs.rows import write_rows
from ...upstream_types import UpstreamModule
from ..adapter import RecordingKernels
from ..batch import VisionBatch
from ..fit import refuse_images
from ..guard import guarded_shape, write_guarded


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
