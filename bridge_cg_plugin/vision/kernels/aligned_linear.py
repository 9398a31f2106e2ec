"""A linear layer whose backward multiplies matrices of aligned sizes and sums a bias's gradient by the plugin's kernel.

Matrix libraries have no fast kernels for rows that begin at odd places: Qwen2.5-VL's MLP is 3420 wide, and its products
take twice as long as those of 3424. Zeros up to the next multiple change no sum but its order. The forward is eager's.
"""

from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

ALIGNMENT = 8  # elements of 2 bytes in the 16 that kernels load at once


def is_misaligned(linear: nn.Linear) -> bool:
    """Whether a side of the weight is no multiple of `ALIGNMENT`."""
    return any(size % ALIGNMENT for size in linear.weight.shape)


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` as PyTorch computes it.

    Args:
        x: `[tokens, inputs]`.
        weight: `[outputs, inputs]`.
        bias: `[outputs]`.
    """
    out: Tensor = _AlignedBackward.apply(x, weight, bias)
    return out


class _AlignedBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        padded = _padded(gradient)
        return (
            (padded @ _padded(_padded(weight.t()).t()))[:, : x.shape[1]] if of_x else None,
            (padded.t() @ _padded(x))[: weight.shape[0], : weight.shape[1]] if of_weight else None,
            _sum(gradient) if of_bias else None,
        )


def _sum(gradient: Tensor) -> Tensor:
    """Return the sum over rows."""
    if not gradient.is_cuda or find_spec("triton") is None:
        return gradient.sum(0)
    from .reduction import column_sum

    return column_sum(gradient.contiguous(), gradient.dtype)


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix with zeros behind its columns, up to a multiple of `ALIGNMENT`."""
    missing = -matrix.shape[1] % ALIGNMENT
    return functional.pad(matrix, (0, missing)) if missing else matrix
