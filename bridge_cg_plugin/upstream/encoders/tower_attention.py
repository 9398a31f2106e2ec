"""By which kernels Hugging Face's encoders attend in packed segments: PyTorch's, cuDNN's or FlashAttention's."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...attention_bounds import cudnn_pays
from ...graphs.instance import every_module
from ...upstream_types import UpstreamModule
from ...vision.adapter import OtherAttention, RecordingKernels
from ...vision.kernels.packed_attention import PackedSegments, packed_attention, taken_apart
from ..seams.own_code import as_shipped
from ..wrappers import overridden
from .direct_attention import FLASH_FROM, Located, flash_attention_refusal, segment_attention_refusal
from .packed_towers import Rotation

# Called with the module, hidden states, segments, and the rotation as upstream's layers hand them on. As `attend` it
# takes what attends, an `Attend`.
AttentionForward = Callable[..., Any]
# Called with what projections made (see `taken_apart`), upstream's function that rotates queries and keys, the
# rotation, the segments, and what products of queries and keys are multiplied by. Returns `[tokens, heads, width]`.
Attend = Callable[[tuple[Tensor, ...], Callable[..., Any], Rotation, PackedSegments, float], Tensor]


def attend(
    projected: tuple[Tensor, ...],
    rotate: Callable[..., Any],
    rotation: Rotation,
    segments: PackedSegments,
    scale: float,
) -> Tensor:
    """Attend by PyTorch's kernels; see `Attend`."""
    query, key, value = taken_apart(projected)
    query, key = rotation.apply(rotate, query, key)
    return packed_attention(query, key, value, segments, scale)


class _AttendByCuDNN:
    """Attends by cuDNN's kernels where they are the faster, and else by PyTorch's; see `Attend`."""

    def __init__(self) -> None:
        self._located = Located()

    def __call__(
        self,
        projected: tuple[Tensor, ...],
        rotate: Callable[..., Any],
        rotation: Rotation,
        segments: PackedSegments,
        scale: float,
    ) -> Tensor:
        query, offsets = taken_apart(projected)[0], segments.offsets
        (tokens, heads, width), most = query.shape, offsets.shape[0] - 1
        if rotation.halves is None or not cudnn_pays(most, segments.largest, tokens):
            return attend(projected, rotate, rotation, segments, scale)
        from ...vision.kernels.rotary import rotate_interleaved
        from ...vision.kernels.segment_attention import plans_for, segment_attention

        plans = plans_for(query, most, segments.largest, scale)
        if plans is None:
            return attend(projected, rotate, rotation, segments, scale)
        parts = rotate_interleaved(projected, *rotation.halves, rotation.rounds)
        return segment_attention(*parts, self._located(offsets, heads, width), plans)


def _attend_by_flash(
    otherwise: Attend,
    projected: tuple[Tensor, ...],
    rotate: Callable[..., Any],
    rotation: Rotation,
    segments: PackedSegments,
    scale: float,
) -> Tensor:
    """Attend by FlashAttention's kernels where segments may be long, and else as `otherwise` does; see `Attend`."""
    query = taken_apart(projected)[0]
    if rotation.halves is None or segments.largest < FLASH_FROM:
        return otherwise(projected, rotate, rotation, segments, scale)
    from . import flash_attention as flash

    width = query.shape[2]
    if not flash.takes(width, query.dtype) or not flash.agrees(width, query.dtype, query.device.index):
        return otherwise(projected, rotate, rotation, segments, scale)
    from ...vision.kernels.rotary import rotate_interleaved

    parts = rotate_interleaved(projected, *rotation.halves, rotation.rounds)
    return flash.flash_attention(*parts, segments.offsets, segments.largest, scale)


def attending(attention: str, forward: AttentionForward) -> RecordingKernels:
    """Return kernels that let attention take `PackedSegments` while a region is recorded.

    Hugging Face's own reads the offsets on the host and attends segment by segment, or hands the longest segment's
    length over as a device tensor.

    Args:
        attention: Name of the class of attention.
        forward: Called in its place, with the module first.
    """

    @contextmanager
    def kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in every_module(modules):
                if type(module).__name__ == attention and as_shipped(module, "forward"):
                    stack.enter_context(overridden(module, "forward", partial(forward, module)))
            yield

    return kernels


def attending_by_cudnn(attention: str, forward: AttentionForward) -> OtherAttention:
    """Return cuDNN's attention in the place of PyTorch's; arguments as of `attending`, entered inside its kernels."""
    return _other(attention, forward, lambda otherwise: _AttendByCuDNN(), segment_attention_refusal)


def attending_by_flash(attention: str, forward: AttentionForward) -> OtherAttention:
    """Return FlashAttention in the place of either; arguments as of `attending`, entered inside their kernels."""
    return _other(attention, forward, lambda otherwise: partial(_attend_by_flash, otherwise), flash_attention_refusal)


def _other(
    attention: str, forward: AttentionForward, make: Callable[[Attend], Attend], refusal: Callable[[], str | None]
) -> OtherAttention:
    """Return attention in the place of that which modules have; `make` is called with that for every recording."""

    @contextmanager
    def kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
        found = (_attends(module) for module in every_module(modules) if type(module).__name__ == attention)
        with attending(attention, partial(forward, attend=make(next(found, attend))))(modules):
            yield

    return OtherAttention(kernels, refusal, replaces="PyTorch's", rounds_as_eager=False)


def _attends(module: UpstreamModule) -> Attend:
    """Return what attends in a module inside kernels of `attending`."""
    found: Attend = module.forward.keywords.get("attend", attend)
    return found


def joint_attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: Rotation,
    attend: Attend = attend,
) -> Tensor:
    """Attend by queries, keys and values of one projection; see `AttentionForward`."""
    tokens = hidden_states.shape[0]
    mixed = attention.qkv(hidden_states).view(tokens, 3, attention.num_heads, -1)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision
    context = attend((mixed,), rotate, position_embeddings, cu_seqlens, attention.scaling)
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected
