"""Qwen2.5-Omni's vision encoder, Hugging Face's module, as a region: Qwen2.5-VL's but for attention's projections."""

from torch import Tensor

from ...upstream_types import UpstreamModule
from ...vision.kernels.packed_attention import PackedSegments
from .packed_towers import Rotation, held_as
from .qwen25_vl import Qwen25VLEncoder
from .tower_attention import Projected, attend, tower_family


class Qwen25OmniEncoder(Qwen25VLEncoder):
    """See `Qwen25VLEncoder`, whose forward differs in attention alone."""

    title = "Qwen2.5-Omni"


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

    tokens = hidden_states.shape[0]
    parts = tuple(
        project(hidden_states).view(tokens, attention.num_heads, -1)
        for project in (attention.q, attention.k, attention.v)
    )
    rotate = apply_rotary_pos_emb_vision
    context = attend(Projected(parts, rotate, position_embeddings, cu_seqlens, attention.scaling))
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected


QWEN25_OMNI = tower_family(
    "Qwen2_5OmniVisionAttention",
    separate_attention,
    name="Qwen2.5-Omni",
    find=held_as("visual", "Qwen2_5OmniVisionEncoder"),
    encoder=Qwen25OmniEncoder,
)
