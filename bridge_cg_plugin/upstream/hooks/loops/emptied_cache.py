"""Loops that take a model off the device call `torch.cuda.empty_cache` after it; graphs' memory leaves with the model.

A seam of PyTorch: it is patched with the first model of such a loop that asks for graphs, and never before.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ....graphs.memory.ranges import close_left
from ...seams.activation import before_deactivation
from ...seams.patches import Patch
from ...seams.seam import Seam

SEAM = Seam(
    name="emptied_cache",
    module="torch.cuda",
    target="empty_cache",
    kind="function",
    touch="patched",
    purpose="memory of graphs leaves the device with the model",
)
_listeners: list[Callable[[], object]] = []


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, with or without memory."""
    return tensor.is_cuda


def has_left(model: nn.Module) -> bool:
    """Whether every parameter of a model is off the device, or has lost its memory."""
    # The first one that is there ends the search: a model that stayed costs no time.
    first = next(model.parameters(), None)
    return first is not None and all(
        not is_on_device(parameter) or parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters()
    )


def _telling(old: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(old)
    def empty_cache() -> Any:
        found = old()
        close_left()
        for listener in _listeners:
            listener()
        return found

    return empty_cache


PATCH = Patch(SEAM, _telling)


def after_empty_cache(listener: Callable[[], object]) -> None:
    """Call a function after every `torch.cuda.empty_cache` until the plugin is switched off."""
    if listener not in _listeners:
        _listeners.append(listener)
    PATCH.apply(torch.cuda)


def _forget() -> None:
    _listeners.clear()
    PATCH.revert()


before_deactivation(_forget)
