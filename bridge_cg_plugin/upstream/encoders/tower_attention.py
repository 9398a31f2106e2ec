"""By which kernels Hugging Face's encoders attend in packed segments: PyTorch's, cuDNN's or FlashAttention's."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...attention_bounds import cudnn_pays
from ...upstream_types import UpstreamModule
from ...vision.encoder import EncoderFamily, OtherAttention, RecordingKernels
from ...vision.kernels.packed_attention import PackedSegments, packed_attention, taken_apart
from ..kernels.saved_tensors import known_activations
from ..seams.own_code import as_shipped
from ..wrappers import forwards_replaced
from .direct_attention import Located, flash_attention_refusal, segment_attention_refusal
from .packed_towers import Rotation, reordering_kernels


class Projected(NamedTuple):
    """What a layer attends by.

    Attributes:
        made: What projections made; see `taken_apart`.
        rotate: Upstream's function that rotates queries and keys.
        rotation: How they are rotated.
        segments: Where to attend.
        scale: What products of queries and keys are multiplied by.
    """

    made: tuple[Tensor, ...]
    rotate: Callable[..., Any]
    rotation: Rotation
    segments: PackedSegments
    scale: float

    def interleaved(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, in one tensor; needs the plugin's kernels."""
        from ...vision.kernels.rotary import rotate_interleaved

        assert self.rotation.halves is not None
        return rotate_interleaved(self.made, *self.rotation.halves, self.rotation.rounds)


# Returns `[tokens, heads, width]`.
Attend = Callable[[Projected], Tensor]
# Called with the module, hidden states, segments, and the rotation as upstream's layers hand them on.
AttentionForward = Callable[..., Any]


def attend(projected: Projected) -> Tensor:
    """Attend by the kernels that are recorded now."""
    return _now(projected)


def _attend_by_pytorch(projected: Projected) -> Tensor:
    made, rotate, rotation, segments, scale = projected
    query, key, value = taken_apart(made)
    query, key = rotation.apply(rotate, query, key)
    return packed_attention(query, key, value, segments, scale)


# One thread records at a time, and no backward attends.
_now: Attend = _attend_by_pytorch


@contextmanager
def _attending_by(make: Callable[[Attend], Attend]) -> Iterator[None]:
    """Let recorded layers attend inside by what is made of that by which they attend outside."""
    global _now
    before, _now = _now, make(_now)
    try:
        yield
    finally:
        _now = before


def _attend_by_cudnn(located: Located, projected: Projected) -> Tensor:
    """Attend by cuDNN's kernels where they are the faster, and else by PyTorch's."""
    query, segments = taken_apart(projected.made)[0], projected.segments
    (tokens, heads, width), most = query.shape, segments.offsets.shape[0] - 1
    if projected.rotation.halves is None or not cudnn_pays(most, segments.largest, tokens):
        return _attend_by_pytorch(projected)
    from ...vision.kernels.cudnn_attention import plans_for, segment_attention

    plans = plans_for(query, most, segments.largest, projected.scale)
    if plans is None:
        return _attend_by_pytorch(projected)
    return segment_attention(*projected.interleaved(), located(segments.offsets, heads, width), plans)


def _attend_by_flash(otherwise: Attend, projected: Projected) -> Tensor:
    """Attend by FlashAttention's kernels where segments may be long, and else as `otherwise` does."""
    if projected.rotation.halves is None:
        return otherwise(projected)
    from . import flash_attention as flash

    offsets, largest = projected.segments.offsets, projected.segments.largest
    if not flash.suits(taken_apart(projected.made)[0], largest):
        return otherwise(projected)
    return flash.flash_attention(*projected.interleaved(), offsets, largest, projected.scale)


def attending(attention: str, forward: AttentionForward) -> RecordingKernels:
    """Return kernels that let attention take `PackedSegments` while a region is recorded.

    Hugging Face's own reads the offsets on the host and attends segment by segment, or hands the longest segment's
    length over as a device tensor.

    Args:
        attention: Name of the class of attention.
        forward: Called in its place, with the module first.
    """

    def wanted(module: nn.Module) -> bool:
        return type(module).__name__ == attention and as_shipped(module, "forward")

    return lambda modules: forwards_replaced(modules, forward, wanted)


def _other(make: Callable[[Attend], Attend], refusal: Callable[[], str | None]) -> OtherAttention:
    return OtherAttention(lambda modules: _attending_by(make), refusal, replaces="PyTorch's", rounds_as_eager=False)


def tower_family(attention: str, forward: AttentionForward, **others: Any) -> EncoderFamily:
    """Return the family of Hugging Face's encoder of images of any size.

    Args:
        attention: Name of its class of attention.
        forward: Called in the place of attention's; see `attending`.
        others: See `EncoderFamily`.
    """
    common: dict[str, Any] = {
        "kernels": attending(attention, forward),
        "reordering_kernels": reordering_kernels,
        "direct_attention": _other(lambda otherwise: partial(_attend_by_cudnn, Located()), segment_attention_refusal),
        "flash_attention": _other(lambda otherwise: partial(_attend_by_flash, otherwise), flash_attention_refusal),
        "known_activations": known_activations,
    }
    return EncoderFamily(**common | others)


def joint_attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: Rotation,
) -> Tensor:
    """Attend by queries, keys and values of one projection; see `AttentionForward`."""
    tokens = hidden_states.shape[0]
    mixed = attention.qkv(hidden_states).view(tokens, 3, attention.num_heads, -1)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision
    context = attend(Projected((mixed,), rotate, position_embeddings, cu_seqlens, attention.scaling))
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected
