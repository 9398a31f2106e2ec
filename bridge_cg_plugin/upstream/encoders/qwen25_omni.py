"""Qwen2.5-Omni's vision encoder, Hugging Face's module, as a region: Qwen2.5-VL's but for attention's projections."""

from torch import Tensor

from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily
from ...vision.kernels.packed_attention import PackedSegments
from ..kernels.saved_tensors import known_activations
from .packed_towers import Rotation, held_as, reordering_kernels
from .qwen25_vl import Qwen25VLAdapter
from .tower_attention import Attend, attend, attending, attending_by_cudnn, attending_by_flash


class Qwen25OmniAdapter(Qwen25VLAdapter):
    """See `PackedTowerAdapter`: the forward differs from Qwen2.5-VL's in attention alone."""

    encoder = "Qwen2.5-Omni"


def separate_attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: Rotation,
    attend: Attend = attend,
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
    context = attend(parts, apply_rotary_pos_emb_vision, position_embeddings, cu_seqlens, attention.scaling)
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected


QWEN25_OMNI = EncoderFamily(
    name="Qwen2.5-Omni",
    find=held_as("visual", "Qwen2_5OmniVisionEncoder"),
    adapt=Qwen25OmniAdapter,
    kernels=attending("Qwen2_5OmniVisionAttention", separate_attention),
    direct_attention=attending_by_cudnn("Qwen2_5OmniVisionAttention", separate_attention),
    flash_attention=attending_by_flash("Qwen2_5OmniVisionAttention", separate_attention),
    reordering_kernels=reordering_kernels,
    known_activations=known_activations,
)
