"""Vision encoders of Qwen2.5-VL and Qwen2.5-Omni, Hugging Face's modules: most layers attend inside windows."""

from torch import Tensor

from ...graphs.buckets import Bucket
from ...graphs.program import Buffers
from ...upstream_types import UpstreamModule
from ...vision.batch import EncoderBatch, shape_of
from ...vision.guard import images, poisoned
from ...vision.kernels.packed_attention import PackedSegments
from ...vision.layout import most_windows, permuted, window_offsets, window_order
from .packed_towers import (
    Rotation,
    TowerEncoder,
    attend,
    frame_segments,
    held_as,
    joint_attention,
    projections,
    rotation,
    tower_family,
)


class Qwen25VLEncoder(TowerEncoder):
    """Everything from patches to merged embeddings of `Qwen2_5_VisionTransformerPretrainedModel`.

    `Qwen2_5OmniVisionEncoder` differs in attention alone.
    """

    def prepare(self) -> None:
        """See `Encoder`."""
        super().prepare()
        self._side: int = self.model.window_size // self.merge // self.model.patch_size

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings `[tokens / merge**2, width]`; hidden states, in order of windows."""
        model, grid = self.model, images(buffers["grid"])
        frames, windows = frame_segments(grid, bucket), self._windows(grid, bucket)
        cells = bucket.tokens // self.merge**2
        order, place, positions = window_order(grid, cells, self.merge, self._side)
        hidden = poisoned(model.patch_embed(buffers["pixels"]), buffers["grid"])
        hidden = permuted(hidden.view(cells, -1), order, place).view(bucket.tokens, -1)
        rotated = rotation(model, positions)
        for index, block in enumerate(model.blocks):
            segments = frames if index in model.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
        return permuted(model.merger(hidden), place, order), hidden

    def _windows(self, grid: Tensor, bucket: Bucket) -> PackedSegments:
        """Return where windows lie."""
        frames, largest = bucket.limits
        windows = most_windows(bucket.tokens // self.merge**2, frames, self._side)
        tokens = min((self._side * self.merge) ** 2, largest)
        return PackedSegments(window_offsets(grid, windows, self.merge, self._side), tokens)

    def out_of_bounds(self, batch: EncoderBatch, misfit: str | None) -> str | None:
        """See `TowerEncoder`: upstream orders patches by the grid."""
        return misfit if shape_of(batch.rows).tokens != batch.tokens else None


QWEN25_VL = tower_family(
    "Qwen2_5_VLVisionAttention",
    joint_attention,
    name="Qwen2.5-VL",
    find=held_as("visual", "Qwen2_5_VisionTransformerPretrainedModel"),
    encoder=Qwen25VLEncoder,
)


def separate_attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: Rotation,
) -> Tensor:
    """Attend by queries, keys and values of a projection each; see `AttentionForward`.

    Upstream takes cosines and sines of the angles in every layer. These are the same numbers, and so is what is
    multiplied by them.
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    parts = projections(attention, hidden_states, "q", "k", "v")
    context = attend(parts, apply_rotary_pos_emb_vision, position_embeddings, cu_seqlens, attention.scaling)
    projected: Tensor = attention.proj(context.flatten(1))
    return projected


QWEN25_OMNI = tower_family(
    "Qwen2_5OmniVisionAttention",
    separate_attention,
    name="Qwen2.5-Omni",
    find=held_as("visual", "Qwen2_5OmniVisionEncoder"),
    encoder=Qwen25VLEncoder,
)
