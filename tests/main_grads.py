"""Gradients in `main_grad`, as megatron-core's data parallelism keeps them."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from bridge_cg_plugin.upstream.hooks.helpers import graph_helper


class Silent:
    """A reduction that waits for nothing: recordings add to `main_grad`."""

    def waits(self) -> bool:
        return False

    def order(self) -> None: ...

    def gather(self) -> None: ...


def reduced() -> Any:
    """Let graphs that are made inside add to `main_grad`, as where data parallelism reduces it."""
    return mock.patch.object(graph_helper, "megatron_reduction", lambda chunks, model: Silent())


def give_main_grads(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Let parts of a buffer, one behind the other, be the `main_grad` of parameters; it may have more elements."""
    start = 0
    for parameter in parameters:
        parameter.main_grad = flat[start : start + parameter.numel()].view_as(parameter)
        parameter.grad_added_to_main_grad = False
        start += parameter.numel()


def hook_main_grads(parameters: Iterable[nn.Parameter]) -> list[Node]:
    """Let hooks add gradients to `main_grad`, zeros where there is none; they end with the nodes that are returned."""
    nodes = []
    for parameter in parameters:
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
        nodes.append(get_gradient_edge(parameter).node)
        nodes[-1].register_hook(_accumulates(parameter))
    return nodes


def _accumulates(parameter: nn.Parameter) -> Callable[..., None]:
    def accumulate(*unused: object) -> None:
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    return accumulate
