"""Rotary position embedding of a packed `[tokens, heads, width]` tensor in one kernel, fp32 inside.

The eager formula, rounded where eager rounds: `x * cos + rotate_half(x) * sin` in fp32, then the input's dtype. No
multiply-add is fused, so forward and backward equal eager's to the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    SIGN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    lanes = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (lanes < HALF)
    source = x_ptr + token * token_stride + heads * head_stride + lanes
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + lanes, mask=lanes < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + lanes, mask=lanes < HALF, other=0.0) * SIGN
    target = out_ptr + token * (HEADS * HALF * 2) + heads * (HALF * 2) + lanes
    kind = out_ptr.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(kind), mask=inside)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    tokens, heads, width = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HALF=width // 2,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        HALF_BLOCK=triton.next_power_of_2(width // 2),
        SIGN=sign,
        enable_fp_fusion=False,
    )
    return out


class _Rotary(Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        cos, sin = ctx.saved_tensors
        # The rotation's transpose turns the other way.
        return _launch(gradient, cos, sin, -1.0), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys.

    Args:
        x: `[tokens, heads, width]`, any floating dtype, last dimension contiguous or not.
        cos, sin: `[tokens, width / 2]` fp32, contiguous.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    return _Rotary.apply(x, cos, sin)


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cos`, `sin` for `apply_rotary` from angles `[tokens, 1, 1, width]` whose halves are equal."""
    half = angles.reshape(angles.shape[0], -1)[:, : angles.shape[-1] // 2].contiguous()
    return torch.cos(half), torch.sin(half)
