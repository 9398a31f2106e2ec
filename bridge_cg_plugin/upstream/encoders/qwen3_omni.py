"""Qwen3-Omni's vision encoder, Hugging Face's module, as a region: Qwen3-VL's encoder in layers of Hugging Face."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers
from ...vision.batch import EncoderBatch
from ...vision.guard import images, poisoned
from ...vision.layout import TokenPositions, position_interpolation, token_positions
from .packed_towers import TowerEncoder, frame_segments, held_as, joint_attention, rotation_at, tower_family


class Qwen3OmniEncoder(TowerEncoder):
    """Everything from patches to merged embeddings and deepstack features of `Qwen3OmniMoeVisionEncoder`."""

    title = "Qwen3-Omni"

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings, deepstack features, `[tokens / merge**2, width]`; hidden states."""
        model, grid = self.model, images(buffers["grid"])
        segments = frame_segments(grid, bucket)
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.patch_embed(buffers["pixels"])
        hidden = hidden + self._embeddings(positions, buffers["grid"]).to(hidden.dtype)
        rotated = rotation_at(model, positions)
        deepstack, places = [], list(model.deepstack_visual_indexes)
        for index, block in enumerate(model.blocks):
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
            if index in places:
                deepstack.append(model.deepstack_merger_list[places.index(index)](hidden))
        return model.merger(hidden), *deepstack, hidden

    def _embeddings(self, positions: TokenPositions, guarded: Tensor) -> Tensor:
        """Return every token's position embedding, `[capacity, width]` fp32; zero for padding."""
        model = self.model
        indices, weights = position_interpolation(positions, model.num_grid_per_side, torch.float32)
        embeddings: Tensor = (model.pos_embed(indices) * poisoned(weights, guarded)[:, :, None]).sum(0)
        return embeddings

    def output_rows(self, batch: EncoderBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        features = {index for index in self.model.deepstack_visual_indexes if index < len(self.model.blocks)}
        return (batch.tokens // self.merge**2,) * (1 + len(features)) + (batch.tokens,)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`: embeddings, deepstack features, hidden states."""
        return returned.pooler_output, *returned.deepstack_features, returned.last_hidden_state

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import BaseModelOutputWithDeepstackFeatures

        kind: Any = BaseModelOutputWithDeepstackFeatures
        merged, *deepstack, hidden = outputs
        return kind(last_hidden_state=hidden, pooler_output=merged, deepstack_features=deepstack)


QWEN3_OMNI = tower_family(
    "Qwen3OmniMoeVisionAttention",
    joint_attention,
    name="Qwen3-Omni",
    find=held_as("visual", "Qwen3OmniMoeVisionEncoder"),
    encoder=Qwen3OmniEncoder,
)
