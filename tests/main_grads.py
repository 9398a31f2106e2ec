"""Gradients of many parameters in one buffer, as megatron-core's data parallelism keeps them."""

from collections.abc import Iterable

from torch import Tensor, nn


def give_main_grads(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Let parts of a buffer, one behind the other, be the `main_grad` of parameters; it may have more elements."""
    start = 0
    for parameter in parameters:
        parameter.main_grad = flat[start : start + parameter.numel()].view_as(parameter)
        parameter.grad_added_to_main_grad = False
        start += parameter.numel()
