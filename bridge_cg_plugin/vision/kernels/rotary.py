"""Rotary position embedding of packed `[tokens, heads, width]` tensors in one kernel, fp32 inside.

The eager formula, rounded where eager rounds: `x * cos + rotate_half(x) * sin` in fp32, then the input's dtype. Where
eager computes in the input's dtype, both products are rounded, too. No multiply-add is fused, so forward and backward
equal eager's to the last bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .packed_attention import taken_apart


@triton.jit
def _turned(first, second, cos, sin, ROUNDS: tl.constexpr, kind: tl.constexpr):
    if ROUNDS:
        turned = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
        second = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
        return turned, second
    else:
        return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    out_part,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    SIGN: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    lanes = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (lanes < HALF)
    cos = tl.load(cos_ptr + token * HALF + lanes, mask=lanes < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + lanes, mask=lanes < HALF, other=0.0) * SIGN
    kind = out_ptr.dtype.element_ty
    target = out_ptr + token * out_token + heads * out_head + lanes
    query = q_ptr + token * q_token + heads * q_head + lanes
    first = tl.load(query, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(query + HALF, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:  # read before anything is written: in place, a load behind a store would wait for it
        key = k_ptr + token * k_token + heads * k_head + lanes
        k_first = tl.load(key, mask=inside, other=0.0).to(tl.float32)
        k_second = tl.load(key + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = _turned(first, second, cos, sin, ROUNDS, kind)
    tl.store(target, first.to(kind), mask=inside)
    tl.store(target + HALF, second.to(kind), mask=inside)
    if PARTS > 1:
        k_first, k_second = _turned(k_first, k_second, cos, sin, ROUNDS, kind)
        tl.store(target + out_part, k_first.to(kind), mask=inside)
        tl.store(target + out_part + HALF, k_second.to(kind), mask=inside)
    if PARTS > 2:
        value = v_ptr + token * v_token + heads * v_head + lanes
        target += 2 * out_part
        tl.store(target, tl.load(value, mask=inside, other=0.0), mask=inside)
        tl.store(target + HALF, tl.load(value + HALF, mask=inside, other=0.0), mask=inside)


def _launch(
    parts: Sequence[Tensor], cos: Tensor, sin: Tensor, outs: Sequence[Tensor], sign: float, rounds: bool
) -> None:
    """Rotate one tensor, or the first two of three and copy the last, unless it lies there already.

    Several outputs are one tensor taken apart.
    """
    tokens, heads, width = parts[0].shape
    three = (*parts, *parts, *parts)[:3]
    between = outs[1].storage_offset() - outs[0].storage_offset() if len(outs) > 1 else 0
    _rotate[(tokens,)](
        *(*three, cos, sin, outs[0]),
        *(stride for part in (*three, outs[0]) for stride in part.stride()[:2]),
        between,
        PARTS=2 if len(parts) == 3 and _lie_as(parts[2:], outs[2:]) else len(parts),
        HEADS=heads,
        HALF=width // 2,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        HALF_BLOCK=triton.next_power_of_2(width // 2),
        SIGN=sign,
        ROUNDS=rounds,
        enable_fp_fusion=False,
    )


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, rounds: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rounds = rounds
        return _rotated(x, cos, sin, 1.0, rounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        # The rotation's transpose turns the other way.
        return _rotated(gradient, cos, sin, -1.0, ctx.rounds), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float, rounds: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_by_lane((x,)), cos, sin, (out,), sign, rounds)
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, rounds: bool = False) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: `[tokens, heads, width]`, any floating dtype, last dimension contiguous or not.
        cos, sin: `[tokens, width / 2]` fp32, contiguous.
        rounds: Whether eager computes in x's dtype, so that products are rounded.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    out: Tensor = _Rotary.apply(x, cos, sin, rounds)
    return out


def _interleaved(mixed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[tokens, heads, width]` as views of `[tokens, heads * 3 * width]`."""
    by_head = mixed.view(mixed.shape[0], heads, 3, -1)
    return by_head[:, :, 0], by_head[:, :, 1], by_head[:, :, 2]


def _lie_as(parts: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(p.data_ptr() == o.data_ptr() and p.stride() == o.stride() for p, o in zip(parts, others, strict=True))


def _by_lane(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the parts with the elements of a head one after the other, as kernels read them."""
    return tuple(part if part.stride(2) == 1 else part.contiguous() for part in parts)


class _RotaryQKV(Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        # In place behind autograd's back: whoever made `mixed` keeps no output for its backward.
        parts = _interleaved(mixed.detach(), heads)
        _launch(parts, cos, sin, parts, 1.0, False)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        out = _whole(gradients)
        if out is None:
            gradients = _by_lane(gradients)
            tokens, heads, width = gradients[0].shape
            out = gradients[0].new_empty((tokens, heads * 3 * width))
        _launch(gradients, cos, sin, _interleaved(out, gradients[0].shape[1]), -1.0, False)
        return out, None, None, None


def _whole(parts: tuple[Tensor, ...]) -> Tensor | None:
    """Return the tensor that parts lie interleaved in, if there is one."""
    first = parts[0]
    storage = first.untyped_storage()
    room = storage.nbytes() // first.element_size() - first.storage_offset()
    shared = all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in parts)
    tokens, heads, width = first.shape
    if not shared or room < 3 * first.numel():
        return None
    whole = first.as_strided((tokens, heads * 3 * width), (heads * 3 * width, 1))
    return whole if _lie_as(parts, _interleaved(whole, heads)) else None


def rotate_qkv(mixed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys of a projection's output in place.

    Args:
        mixed: `[tokens, heads * 3 * width]`, contiguous: query, key and value of each head one after the other. Its
            memory is overwritten.
        cos, sin: `[tokens, width / 2]` fp32, contiguous.
        heads: Attention heads.

    Returns:
        Queries, keys and values `[tokens, heads, width]`, views of `mixed`. Their gradients may lie anywhere; where
        they lie as their values do, the backward works in place, too.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _RotaryQKV.apply(mixed, cos, sin, heads)
    return parts


class _Interleaved(Function):
    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, rounds: bool, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.rounds, ctx.joint = rounds, len(sources) == 1
        parts = _by_lane(taken_apart(sources))
        tokens, heads, width = parts[0].shape
        out = _interleaved(parts[0].new_empty((tokens, heads * 3 * width)), heads)
        _launch(parts, cos, sin, out, 1.0, rounds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        gradients = _by_lane(gradients)
        tokens, heads, width = gradients[0].shape
        whole = gradients[0].new_empty((tokens, 3, heads, width) if ctx.joint else (3, tokens, heads, width))
        outs = whole.unbind(1 if ctx.joint else 0)
        _launch(gradients, cos, sin, outs, -1.0, ctx.rounds)
        return None, None, None, *((whole,) if ctx.joint else outs)


def rotate_interleaved(
    sources: tuple[Tensor, ...], cos: Tensor, sin: Tensor, rounds: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, and copy values beside them.

    Args:
        sources: See `taken_apart`; any floating dtype.
        cos, sin: `[tokens, width / 2]` fp32, contiguous.
        rounds: As of `apply_rotary`.

    Returns:
        Queries, keys and values `[tokens, heads, width]`: one tensor `[tokens, heads, 3, width]` taken apart. Gradients
        of sources are contiguous.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _Interleaved.apply(cos, sin, rounds, *sources)
    return parts


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cos`, `sin` for `apply_rotary` from angles whose halves are equal.

    Args:
        angles: `[tokens, 1, 1, width]` or `[sequence, batch, 1, width]`.
    """
    half = angles.reshape(-1, angles.shape[-1])[:, : angles.shape[-1] // 2].contiguous()
    return torch.cos(half), torch.sin(half)
