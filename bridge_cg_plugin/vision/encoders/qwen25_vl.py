"""Qwen2.5-VL's vision encoder, Hugging Face's module, as a region: most layers attend inside windows."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...attention_bounds import scanned_limits
from ...graphs.buckets import Bucket
from ...graphs.program import Buffers, RegionProgram
from ...upstream_types import UpstreamModule
from ..adapter import EncoderCall, RecordingKernels
from ..batch import BatchError, VisionBatch, patch_shape, patches_misfit, read_patches
from ..guard import images, poisoned
from ..host_grids import HostGrids, token_count
from ..kernels.packed_attention import PackedSegments
from .grid_program import GridProgram
from .hugging_face_calls import returns_an_object
from .layout import segment_offsets
from .windows import most_windows, permuted, window_offsets, window_order


class Qwen25VLEncoder(GridProgram):
    """Everything from patches to merged embeddings, in one region.

    Layers get `PackedSegments` where upstream passes `cu_seqlens`; `kernels` must let attention take them.

    Args:
        model: Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward.
    """

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(model, exact_below, kernels)
        self._side: int = model.window_size // self.merge // model.patch_size

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: embeddings `[tokens / merge**2, width]`."""
        model, grid = self.model, images(buffers["grid"])
        frames, windows = self._segments(grid, bucket)
        cells = bucket.tokens // self.merge**2
        order = window_order(grid, cells, self.merge, self._side)
        hidden = model.patch_embed(buffers["pixels"])
        hidden = permuted(hidden.view(cells, -1), order.order, order.place).view(bucket.tokens, -1)
        angles = poisoned(model.rotary_pos_emb(order.positions), buffers["grid"])
        angles = torch.cat((angles, angles), dim=-1)
        rotation = angles.cos(), angles.sin()
        for index, block in enumerate(model.blocks):
            segments = frames if index in model.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotation)
        return (permuted(model.merger(hidden), order.place, order.order),)

    def _segments(self, grid: Tensor, bucket: Bucket) -> tuple[PackedSegments, PackedSegments]:
        """Return where frames and where windows lie."""
        frames, largest = bucket.limits
        windows = most_windows(bucket.tokens // self.merge**2, frames, self._side)
        tokens = min((self._side * self.merge) ** 2, largest)
        return (
            PackedSegments(segment_offsets(grid, frames), largest),
            PackedSegments(window_offsets(grid, windows, self.merge, self._side), tokens),
        )

    def output_rows(self, batch: VisionBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.tokens // self.merge**2,)


class Qwen25VLAdapter:
    """See `EncoderAdapter`.

    Args:
        model: Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`.
        make_result: Makes what its forward returns from the merged embeddings.
    """

    unit_of = "one embedding"
    deterministic_tokens = math.inf

    def __init__(self, model: UpstreamModule, make_result: Callable[[Tensor], Any]) -> None:
        self._model, self._make_result = model, make_result
        self._patch = patch_shape(model.config)
        self._merge: int = model.config.spatial_merge_size
        self.unit = self._merge**2

    def read(self, grids: HostGrids, hidden_states: Tensor, grid_thw: Tensor, **others: Any) -> EncoderCall:
        """See `EncoderAdapter`. With fewer patches than the grid describes, eager reads out of bounds on the device."""
        batch = read_patches(grids, hidden_states, grid_thw, self._patch, self._model.patch_embed.proj.weight.device)
        misfit = patches_misfit(batch, self._merge)
        if token_count(batch.rows) != batch.tokens:
            raise BatchError(misfit)
        return EncoderCall(batch, returns_an_object(others), misfit)

    def run(self, forward: Callable[..., Any], batch: VisionBatch) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels, grid_thw=batch.grid, return_dict=True)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return (returned.pooler_output,)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `EncoderAdapter`."""
        return self._make_result(outputs[0])

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`: kernels look at every frame as if it were the largest, and leave where it is not."""
        return [*scanned_limits(capacity, frames)]

    def program(self, exact_below: int, kernels: RecordingKernels) -> RegionProgram:
        """See `EncoderAdapter`."""
        return Qwen25VLEncoder(self._model, exact_below, kernels)
