"""Qwen3-VL's vision encoder (dense, MoE and Qwen3.5-VL share it) as a region."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention_bounds import DETERMINISTIC_TOKENS, frame_limits, scanned_limits
from ...graphs.buckets import Bucket
from ...graphs.program import Buffers
from ...graphs.side_stream import ahead, beside
from ...upstream_types import UpstreamModule
from ..adapter import EncoderCall, MovableImages, PackSegments, RecordingKernels
from ..batch import VisionBatch, patch_shape, patches_misfit, read_patches
from ..guard import images, poisoned
from ..host_grids import HostGrids
from .grid_program import GridProgram
from .layout import TokenPositions, rotary_angles, segment_offsets, token_positions
from .position_embedding import embeddings, learned, scatter


@dataclass(frozen=True, slots=True)
class _Located:
    """What follows from `grid_thw` alone, before the first layer.

    Attributes:
        positions: Of the padded batch's tokens.
        offsets: `cu_seqlens` of the frames.
        angles: Of rotary embedding.
        embeddings: Of positions, `[capacity, width]`.
    """

    positions: TokenPositions
    offsets: Tensor
    angles: Tensor
    embeddings: Tensor


class Qwen3VLEncoder(GridProgram):
    """Everything from patches to merged embeddings and deepstack features, in one region.

    Args:
        model: Bridge's `Qwen3VLVisionModel`, or one with the same parts.
        pack_segments: Builds upstream's attention metadata.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward; swaps in faster kernels that compute the same.
    """

    def __init__(
        self,
        model: UpstreamModule,
        pack_segments: PackSegments,
        exact_below: int = 0,
        kernels: RecordingKernels = nullcontext,
    ) -> None:
        super().__init__(model, exact_below, kernels)
        self._pack_segments = pack_segments

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings, then deepstack features, `[tokens / merge**2, width]` each."""
        model = self.model
        _, largest = bucket.limits
        guarded, table = buffers["grid"], model.pos_embed.weight
        grid = images(guarded)
        locating = ahead(lambda: self._located(grid, guarded, bucket), grid, guarded, table)
        trains = torch.is_grad_enabled() and table.requires_grad
        places = beside(lambda: scatter(table, grid, bucket.tokens), grid) if trains else None
        hidden = model.patch_embed(buffers["pixels"])
        located = locating.result()
        hidden = hidden + learned(table, located.embeddings, located.positions, places)
        hidden, deepstack = model.decoder(
            hidden_states=hidden[:, None],
            attention_mask=None,
            inference_params=None,
            rotary_pos_emb=located.angles,
            packed_seq_params=self._pack_segments(located.offsets, largest),
        )
        return model.merger(hidden), *deepstack

    def _located(self, grid: Tensor, guarded: Tensor, bucket: Bucket) -> "_Located":
        positions = token_positions(grid, bucket.tokens, self.merge)
        return _Located(
            positions,
            segment_offsets(grid, bucket.limits[0]),
            rotary_angles(positions, poisoned(self._inverse_frequencies(), guarded)),
            embeddings(self.model.pos_embed.weight, positions),
        )

    def _inverse_frequencies(self) -> Tensor:
        rotary = self.model.rotary_pos_emb
        if not hasattr(rotary, "inv_freq"):
            rotary(1)  # upstream makes the buffer in its first call
        frequencies: Tensor = rotary.inv_freq
        return frequencies

    def output_rows(self, batch: VisionBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        merged = batch.tokens // self.merge**2
        return (merged,) * (1 + len(self.model.decoder.deepstack_merger_list))


class Qwen3VLAdapter:
    """See `EncoderAdapter`.

    Args:
        model: Bridge's `Qwen3VLVisionModel`, or one with the same parts.
        pack_segments: Builds upstream's attention metadata.
    """

    unit_of = "one embedding"
    deterministic_tokens: float = DETERMINISTIC_TOKENS

    def __init__(self, model: UpstreamModule, pack_segments: PackSegments) -> None:
        self._model, self._pack_segments = model, pack_segments
        self._patch = patch_shape(model.config)
        self._merge: int = model.config.spatial_merge_size
        self.unit = self._merge**2

    def read(
        self,
        grids: HostGrids,
        hidden_states: Tensor,
        grid_thw: Tensor,
        inference_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
    ) -> EncoderCall:
        """See `EncoderAdapter`."""
        device = self._model.patch_embed.proj.weight.device
        batch = read_patches(grids, hidden_states, grid_thw, self._patch, device)
        return EncoderCall(batch, not (inference_params or extra_block_kwargs), patches_misfit(batch, self._merge))

    def run(self, forward: Callable[..., Any], batch: VisionBatch) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels, batch.grid)

    def outputs(self, returned: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`: embeddings, then deepstack features."""
        hidden, deepstack = returned
        return hidden, *deepstack

    def returned(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `EncoderAdapter`."""
        return outputs[0], list(outputs[1:])

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`."""
        return [*(scanned_limits if directly else frame_limits)(capacity, frames)]

    def program(self, exact_below: int, kernels: RecordingKernels) -> Qwen3VLEncoder:
        """See `EncoderAdapter`."""
        return Qwen3VLEncoder(self._model, self._pack_segments, exact_below, kernels)


def movable_images(model: UpstreamModule) -> MovableImages:
    """Return what of a vision model's images travels to other ranks: patches; embeddings with deepstack features."""
    config = model.config
    outputs = 1 + len(model.decoder.deepstack_merger_list)
    return MovableImages(
        unit=config.spatial_merge_size**2,
        patch_width=config.in_channels * config.temporal_patch_size * config.patch_size**2,
        widths=(config.out_hidden_size,) * outputs,
        weight=model.patch_embed.proj.weight,
    )
