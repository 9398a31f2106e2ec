"""Rows of a table sampled between its cells: PyTorch's bicubic `grid_sample` of one image at single points.

PyTorch's kernels give a point's channels to one thread, one after the other, and add gradients by atomics. Here a
program has one point and many channels. The forward multiplies and adds in the order of PyTorch's compiled kernel, so
its results are equal to the last bit. A cell's gradient is a product of weights and gradients; one that is not finite
reaches all cells of its channel.

Source of the formula: `cubic_interp1d` and `get_value_bounded` in PyTorch's `GridSampler.cuh`, with a = -0.75.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHANNELS_BLOCK = 256
# Of the backward: cells and channels of a program, points of a step.
CELLS, CHANNELS, POINTS = 64, 64, 32


@triton.jit
def _near(x):
    """Return the weight of a cell at a distance of up to 1."""
    return tl.fma(tl.fma(x, 1.25, -2.25) * x, x, 1.0)


@triton.jit
def _far(x):
    """Return the weight of a cell at a distance of 1 to 2."""
    return tl.fma(tl.fma(tl.fma(x, -0.75, 3.75), x, -6.0), x, 3.0)


@triton.jit
def _weights(coordinate, size):
    """Return the cell before a coordinate in [-1, 1] and the weights of four cells, of which it is the second."""
    place = tl.fma(coordinate + 1.0, size.to(tl.float32), -1.0) * 0.5
    before = tl.floor(place)
    after = place - before
    left = 1.0 - after
    return before.to(tl.int32), _far(after + 1.0), _near(after), _near(left), _far(left + 1.0)


@triton.jit
def _clip(cell, size):
    return tl.minimum(tl.maximum(cell, 0), size - 1)


@triton.jit
def _sum(x0, x1, x2, x3, w0, w1, w2, w3):
    return tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x0, w0, x1 * w1)))


@triton.jit
def _row(table, x, x_stride, width, w0, w1, w2, w3):
    """Return one row of cells, interpolated along it; `table` points to its channels at x = 0."""
    x0 = tl.load(table + _clip(x - 1, width) * x_stride)
    x1 = tl.load(table + _clip(x, width) * x_stride)
    x2 = tl.load(table + _clip(x + 1, width) * x_stride)
    x3 = tl.load(table + _clip(x + 2, width) * x_stride)
    return _sum(x0, x1, x2, x3, w0, w1, w2, w3)


@triton.jit
def _sample(
    table_ptr,
    points_ptr,
    out_ptr,
    height,
    width,
    channels,
    y_stride,
    x_stride,
    channel_stride,
    BLOCK: tl.constexpr,
):
    point = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    x, wx0, wx1, wx2, wx3 = _weights(tl.load(points_ptr + 2 * point), width)
    y, wy0, wy1, wy2, wy3 = _weights(tl.load(points_ptr + 2 * point + 1), height)
    table = table_ptr + tl.where(inside, channel, 0) * channel_stride
    r0 = _row(table + _clip(y - 1, height) * y_stride, x, x_stride, width, wx0, wx1, wx2, wx3)
    r1 = _row(table + _clip(y, height) * y_stride, x, x_stride, width, wx0, wx1, wx2, wx3)
    r2 = _row(table + _clip(y + 1, height) * y_stride, x, x_stride, width, wx0, wx1, wx2, wx3)
    r3 = _row(table + _clip(y + 2, height) * y_stride, x, x_stride, width, wx0, wx1, wx2, wx3)
    tl.store(out_ptr + point * channels + channel, _sum(r0, r1, r2, r3, wy0, wy1, wy2, wy3), inside)


@triton.jit
def _along(cells, before, size, w0, w1, w2, w3):
    """Return the weights `[points, cells]` of places along one side; cells behind an edge count for the edge."""
    found = tl.where(cells[None, :] == _clip(before - 1, size)[:, None], w0[:, None], 0.0)
    found += tl.where(cells[None, :] == _clip(before, size)[:, None], w1[:, None], 0.0)
    found += tl.where(cells[None, :] == _clip(before + 1, size)[:, None], w2[:, None], 0.0)
    return found + tl.where(cells[None, :] == _clip(before + 2, size)[:, None], w3[:, None], 0.0)


@triton.jit
def _spread(
    gradient_ptr,
    points_ptr,
    out_ptr,
    points,
    height,
    width,
    channels,
    point_stride,
    channel_stride,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POINTS: tl.constexpr,
):
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for start in range(0, points, POINTS):
        point = start + tl.arange(0, POINTS).to(tl.int64)
        there = point < points
        x, wx0, wx1, wx2, wx3 = _weights(tl.load(points_ptr + 2 * point, there, 0.0), width)
        y, wy0, wy1, wy2, wy3 = _weights(tl.load(points_ptr + 2 * point + 1, there, 0.0), height)
        weights = _along(cell // width, y, height, wy0, wy1, wy2, wy3)
        weights *= _along(cell % width, x, width, wx0, wx1, wx2, wx3)
        gradient = tl.load(
            gradient_ptr + point[:, None] * point_stride + channel[None, :] * channel_stride,
            there[:, None] & inside[None, :],
            0.0,
        )
        total = tl.dot(tl.trans(weights), gradient, total, input_precision="ieee")
    place = cell[:, None] * channels + channel[None, :]
    tl.store(out_ptr + place, total, (cell < height * width)[:, None] & inside[None, :])


def takes(table: Tensor, points: Tensor) -> bool:
    """Whether these are one fp32 image of several cells on each side, and single points."""
    if not table.dtype == points.dtype == torch.float32 or not table.dim() == points.dim() == 4:
        return False
    return table.shape[0] == points.shape[0] == points.shape[2] == 1 and min(table.shape[2:]) > 1


def bicubic_samples(table: Tensor, points: Tensor) -> Tensor:
    """Return what `grid_sample(mode="bicubic", padding_mode="border", align_corners=False)` does; see `takes`.

    Args:
        table: `[1, channels, height, width]` fp32.
        points: `[1, points, 1, 2]` fp32, x and y in [-1, 1]; gets no gradient.

    Returns:
        `[1, channels, points, 1]` fp32; each point's channels are contiguous.
    """
    found: Tensor = _Samples.apply(table, points)
    return found.t()[None, :, :, None]


class _Samples(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, points: Tensor) -> Tensor:
        _, channels, height, width = table.shape
        places = points.reshape(-1, 2).contiguous()
        out = table.new_empty(places.shape[0], channels)
        blocks = triton.cdiv(channels, CHANNELS_BLOCK)
        sizes, strides = (height, width, channels), (table.stride(2), table.stride(3), table.stride(1))
        settings = {"BLOCK": CHANNELS_BLOCK, "enable_fp_fusion": False}
        _sample[places.shape[0], blocks](table, places, out, *sizes, *strides, **settings)
        ctx.save_for_backward(places)
        ctx.shape = table.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        _, channels, height, width = ctx.shape
        out = gradient.new_empty(height, width, channels)
        grid = triton.cdiv(height * width, CELLS), triton.cdiv(channels, CHANNELS)
        sizes = (places.shape[0], height, width, channels, *gradient.stride())
        _spread[grid](gradient, places, out, *sizes, CELLS=CELLS, CHANNELS=CHANNELS, POINTS=POINTS)
        return out.permute(2, 0, 1)[None], None
