"""Attention inside packed segments by PyTorch's flash kernels, which take offsets as a tensor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """Where segments lie.

    Attributes:
        offsets: `[segments + 1]` int32 `cu_seqlens`, non-decreasing; segments may have no length.
        largest: Bound of a segment's length in tokens.
    """

    offsets: Tensor
    largest: int


def taken_apart(projected: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return queries, keys and values `[tokens, heads, width]`.

    Args:
        projected: One tensor `[tokens, 3, heads, width]`, or these three.
    """
    return projected[0].unbind(1) if len(projected) == 1 else projected


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scale: float) -> Tensor:
    """Attend inside every segment, and nowhere else.

    Args:
        query, key, value: `[tokens, heads, width]`; bf16 or fp16 on a GPU, any floating-point dtype on a CPU, where a
            dense mask stands in for the kernel.
        segments: Rows behind the last one are padding.
        scale: What the products of queries and keys are multiplied by.

    Returns:
        `[tokens, heads, width]`; zero in padding, as are the gradients.

    Raises:
        TypeError: The kernel takes no such dtype.
    """
    if query.device.type != "cuda":
        return masked_attention(query, key, value, segments.offsets, scale)
    if query.dtype not in DTYPES:
        raise TypeError(f"packed attention takes bf16 or fp16 on a GPU, not {query.dtype}")
    out: Tensor = _Flash.apply(query, key, value, segments, scale)
    return out


class _Flash(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: PackedSegments,
        scale: float,
    ) -> Tensor:
        from .padding import clear_padding

        offsets, largest = segments.offsets, segments.largest
        made: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, largest, largest, 0.0, False, False, scale=scale
        )
        out, logsumexp, state, unused, _ = made
        clear_padding(out, offsets)
        ctx.save_for_backward(query, key, value, out, logsumexp, state, unused)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from .padding import clear_padding

        query, key, value, out, logsumexp, state, unused = ctx.saved_tensors
        offsets, largest = ctx.segments.offsets, ctx.segments.largest
        gradients = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            *(query, key, value, out, logsumexp),
            *(offsets, offsets, largest, largest, 0.0, False, state, unused),
            scale=ctx.scale,
        )
        for each in gradients:
            clear_padding(each, offsets)
        return *gradients, None, None


def masked_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Attend as `packed_attention`, by a dense mask, in any floating-point dtype."""
    row = torch.arange(query.shape[0], device=offsets.device, dtype=offsets.dtype)
    segment = torch.searchsorted(offsets[1:].contiguous(), row, right=True)  # behind the last, one more
    mask = segment[:, None] == segment[None, :]  # padding attends to itself: a row with no key would be NaN
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0]
    context = context.transpose(0, 1)
    return torch.where((segment < offsets.shape[0] - 1)[:, None, None], context, 0)
