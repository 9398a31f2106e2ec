"""Attention over packed segments by cuDNN's own kernels, described with a bucket's bounds.

The kernels are those that Transformer Engine runs. Gradients come interleaved as the projection's output lies, and only
rows behind the last segment are zeroed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import cudnn_graphs
from .cudnn_graphs import SegmentPlans, SegmentShape, segment_plans
from .padding import clear_padding


class Segments(NamedTuple):
    """Where segments lie, as cuDNN wants to know it.

    Attributes:
        offsets: `[segments + 1]` int32 `cu_seqlens`.
        bound: What a plan binds, by its number in the graph: int32 lengths, int64 offsets in elements.
    """

    offsets: Tensor
    bound: dict[int, Tensor]


def locate_segments(offsets: Tensor, heads: int, width: int) -> Segments:
    """Return where segments lie in packed tensors of so many heads, computed on the device.

    Args:
        offsets: `[segments + 1]` int32 `cu_seqlens`, non-decreasing, on a device.
        heads, width: Attention heads and the size of one.
    """
    stats = offsets.to(torch.int64) * heads
    out = stats * width
    uids = (cudnn_graphs.LENGTHS, cudnn_graphs.MIXED_OFFSETS, cudnn_graphs.OUT_OFFSETS, cudnn_graphs.STATS_OFFSETS)
    return Segments(offsets, dict(zip(uids, (offsets[1:] - offsets[:-1], out * 3, out, stats), strict=True)))


def _bound(query: Tensor, key: Tensor, value: Tensor, out: Tensor, stats: Tensor) -> dict[int, Tensor]:
    uids = (cudnn_graphs.QUERY, cudnn_graphs.KEY, cudnn_graphs.VALUE, cudnn_graphs.OUT, cudnn_graphs.STATS)
    return dict(zip(uids, (query, key, value, out, stats), strict=True))


class _SegmentAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, plans: SegmentPlans) -> Tensor:
        tokens, heads, width = query.shape
        out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
        stats = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
        plans.forward.run(_bound(query, key, value, out, stats) | segments.bound)
        clear_padding(out, segments.offsets)
        ctx.save_for_backward(query, key, value, out, stats)
        ctx.plans, ctx.segments = plans, segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plans: SegmentPlans = ctx.plans
        tokens, heads, width = gradient.shape
        whole = torch.empty((tokens, heads, 3, width), dtype=gradient.dtype, device=gradient.device)
        gradients = whole.unbind(2)
        of_gradients = {
            cudnn_graphs.GRADIENT: gradient.contiguous(),
            cudnn_graphs.D_QUERY: gradients[0],
            cudnn_graphs.D_KEY: gradients[1],
            cudnn_graphs.D_VALUE: gradients[2],
        }
        plans.backward.run(_bound(*ctx.saved_tensors) | of_gradients | ctx.segments.bound)
        clear_padding(whole, ctx.segments.offsets)
        return *gradients, None, None


def lie_interleaved(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether three `[tokens, heads, width]` tensors are one `[tokens, heads, 3, width]` taken apart."""
    _, heads, width = query.shape
    step = width * query.element_size()
    start = query.data_ptr()
    return (
        query.shape == key.shape == value.shape
        and query.stride() == key.stride() == value.stride() == (heads * 3 * width, 3 * width, 1)
        and (key.data_ptr(), value.data_ptr()) == (start + step, start + 2 * step)
    )


def plans_for(query: Tensor, segments: int, largest: int, scale: float) -> SegmentPlans | None:
    """Return the plans for `segment_attention` over queries `[tokens, heads, width]`, None where cuDNN has none.

    Args:
        query: Of the shape, dtype and device to plan for.
        segments: How many segments there are at most.
        largest: Bound of a segment's length in tokens.
        scale: What the products of queries and keys are multiplied by.
    """
    tokens, heads, width = query.shape
    return segment_plans(SegmentShape(segments, largest, tokens, heads, width, query.dtype, scale), query.device.index)


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, plans: SegmentPlans) -> Tensor:
    """Attend inside every segment.

    Args:
        query, key, value: `[tokens, heads, width]` bf16 or fp16 on a GPU, interleaved (see `lie_interleaved`).
        segments: Where segments lie; rows behind the last one are padding.
        plans: For these tensors, and for as many segments. Of a segment longer than planned for, a part is read and
            written only.

    Returns:
        `[tokens, heads, width]`, contiguous; zero in padding, as are the gradients.
    """
    out: Tensor = _SegmentAttention.apply(query, key, value, segments, plans)
    return out
