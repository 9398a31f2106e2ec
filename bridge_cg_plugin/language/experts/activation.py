"""The function between an expert's two linear layers as one kernel each way."""

from typing import Any

import torch
from torch import Tensor


def weighted_swiglu(inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return `silu(gate) * linear * weight` of every row on a GPU, computed in fp32 and rounded once.

    Args:
        inner: `[rows, 2 * width]`: the gate, then what it lets through.
        weights: `[rows]`, the router's probabilities.
        bounds: See `Rows`.

    Returns:
        `[rows, width]` in the dtype of `inner`; rows behind the last bound hold anything.
    """
    out: Tensor = _WeightedSwiglu.apply(inner, weights, bounds)
    return out


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        from . import swiglu_kernels

        ctx.save_for_backward(inner, weights, bounds)
        return swiglu_kernels.swiglu(inner, weights, bounds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        from . import swiglu_kernels

        return *swiglu_kernels.swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), None
