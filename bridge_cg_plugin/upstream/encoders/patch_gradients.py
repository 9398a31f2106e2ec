"""The patch embedding's weight gradient as a matrix product while a region is recorded.

A convolution whose stride is its kernel multiplies each patch with the weight once. Its forward stays PyTorch's, so
outputs keep eager's bits; for the gradient cuDNN has an implicit convolution without tensor cores (1.4 ms at 6,720
patches on an H200), where one matrix product does.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...graphs.modules import every_module
from ..attributes import overridden
from ..seams.own_code import as_shipped


@contextmanager
def patch_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let convolutions of single patches multiply matrices in their backward, which adds up in another order."""
    with ExitStack() as stack:
        for module in every_module(modules):
            if takes_patches(module):
                stack.enter_context(overridden(module, "forward", functools.partial(_forward, module)))
        yield


def takes_patches(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Whether a module is PyTorch's convolution as shipped, whose windows lie side by side, each used once."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or not as_shipped(module, "forward", "_conv_forward"):
        return False
    kernel, none, one = module.kernel_size, (0,) * len(module.kernel_size), (1,) * len(module.kernel_size)
    return (module.stride, module.padding, module.dilation, module.groups) == (kernel, none, one, 1)


def _forward(convolution: nn.Conv2d | nn.Conv3d, patches: Tensor) -> Tensor:
    autocast = torch.is_autocast_enabled(patches.device.type)  # a function's backward gets no casts
    if patches.requires_grad or autocast or patches.shape[2:] != convolution.kernel_size:
        eager: Callable[..., Tensor] = type(convolution).forward
        return eager(convolution, patches)
    out: Tensor = _PatchConvolution.apply(convolution, patches, convolution.weight, convolution.bias)
    return out


class _PatchConvolution(Function):
    @staticmethod
    def forward(
        ctx: Any, convolution: nn.Conv2d | nn.Conv3d, patches: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(patches)
        ctx.weight = weight.shape
        out: Tensor = convolution._conv_forward(patches, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        (patches,) = ctx.saved_tensors
        flat = gradient.flatten(1)
        weight = (flat.T @ patches.flatten(1)).view(ctx.weight) if ctx.needs_input_grad[2] else None
        bias = flat.sum(0) if ctx.needs_input_grad[3] else None
        return None, None, weight, bias
