"""Qwen3-VL's vision encoder (dense, MoE and Qwen3.5-VL share it) as a region."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.program import Bucket, Buffers, TensorSpec
from .batch import VisionBatch
from .layout import rotary_angles, segment_offsets, token_positions
from .position_embedding import interpolate

# Builds the attention metadata of packed segments from cu_seqlens and the largest segment length.
PackSegments = Callable[[Tensor, int], Any]
# Called with a program's modules.
RecordingKernels = Callable[[Sequence[nn.Module]], AbstractContextManager]


class Qwen3VLEncoder:
    """Everything from patches to merged embeddings and deepstack features, in one region.

    Buckets have the limits (frames, tokens of the largest frame).

    Args:
        model: Bridge's `Qwen3VLVisionModel`, or one with the same parts.
        pack_segments: Builds upstream's attention metadata.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward; swaps in faster kernels that compute the same.
    """

    name = "vision_encoder"

    def __init__(
        self,
        model: nn.Module,
        pack_segments: PackSegments,
        exact_below: int = 0,
        kernels: RecordingKernels = nullcontext,
    ) -> None:
        self.model = model
        self._pack_segments = pack_segments
        self._exact_below = exact_below
        self._kernels = kernels
        config = model.config
        self.merge = config.spatial_merge_size
        self._patch_width = config.in_channels * config.temporal_patch_size * config.patch_size**2

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.model,)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        dtype = self.model.patch_embed.proj.weight.dtype
        return {
            "pixels": TensorSpec((bucket.tokens, self._patch_width), dtype),
            "grid": TensorSpec((bucket.limits[0], 3), torch.int64),
        }

    def size(self, batch: VisionBatch) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: VisionBatch, bucket: Bucket) -> str | None:
        """See `RegionProgram`."""
        frames, largest = bucket.limits
        if batch.tokens <= self._exact_below and batch.tokens != bucket.tokens:
            return "too_few_tokens"
        if batch.frames > frames:
            return "too_many_frames"
        return "frame_too_large" if batch.largest_frame > largest else None

    def load(self, buffers: Buffers, batch: VisionBatch) -> None:
        """See `RegionProgram`."""
        tokens, images = batch.tokens, len(batch.rows)
        buffers["pixels"][:tokens].copy_(batch.pixels.reshape(tokens, -1), non_blocking=True)
        buffers["pixels"][tokens:].zero_()
        grid = batch.grid.reshape(images, 3)
        if grid.device.type == "cpu" and buffers["grid"].device.type == "cuda":
            grid = grid.pin_memory()
        buffers["grid"][:images].copy_(grid, non_blocking=True)
        buffers["grid"][images:].zero_()

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        buffers["pixels"].zero_()
        buffers["grid"].zero_()
        buffers["grid"][0].fill_(self.merge)
        buffers["grid"][0, 0].fill_(1)
        buffers["grid"][0, 2].fill_(min(bucket.tokens, bucket.limits[1]) // self.merge**2 * self.merge)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings, then deepstack features, `[tokens / merge**2, width]` each."""
        model = self.model
        frames, largest = bucket.limits
        positions = token_positions(buffers["grid"], bucket.tokens, self.merge)
        offsets = segment_offsets(buffers["grid"], frames)
        with self._kernels(self.modules()):
            hidden = model.patch_embed(buffers["pixels"])
            hidden = hidden + interpolate(model.pos_embed.weight, buffers["grid"], positions)
            hidden, deepstack = model.decoder(
                hidden_states=hidden[:, None],
                attention_mask=None,
                inference_params=None,
                rotary_pos_emb=rotary_angles(positions, self._inverse_frequencies()),
                packed_seq_params=self._pack_segments(offsets, largest),
            )
            return model.merger(hidden), *deepstack

    def _inverse_frequencies(self) -> Tensor:
        rotary = self.model.rotary_pos_emb
        if not hasattr(rotary, "inv_freq"):
            rotary(1)  # upstream makes the buffer in its first call
        return rotary.inv_freq

    def output_rows(self, batch: VisionBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        merged = batch.tokens // self.merge**2
        return (merged,) * (1 + len(self.model.decoder.deepstack_merger_list))

    def differentiable_inputs(self, batch: VisionBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`: pixels take no gradient."""
        return ()
