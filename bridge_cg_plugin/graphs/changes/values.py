"""What stands for a value: its contents where they are plain, its identity otherwise."""

from collections.abc import Hashable, Iterator
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

MISSING: Any = object()
# How deep containers are compared by what they hold.
NESTED = 3
# Modules that compute nothing of their own; PEFT makes new ones of the same modules whenever it walks a model.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype)
# Values that are the same where they are equal. Any other value is the same only where it is the same object.
_EQUAL = (*_PLAIN, MethodType)


def plain(value: Any) -> bool:
    """Whether a value holds no other object: a number, a text, a type of numbers, a member of an enum or None."""
    return value is None or isinstance(value, _PLAIN)


def word(value: Any) -> str:
    """Return a value for a message; of one that is not plain its type."""
    if value is MISSING:
        return "absent"
    return repr(value) if plain(value) else type(value).__name__


def token(value: Any, depth: int = NESTED) -> Hashable:
    """Return what stands for a value in a state: its contents where they are plain, its identity otherwise."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # two zeros differ, and NaN is itself
    if isinstance(value, _EQUAL):
        return type(value), value
    if type(value) in CONTAINERS:
        return type(value), tuple((name, id(module)) for name, module in value._modules.items())
    if depth and type(value) in (list, tuple):
        return type(value), tuple(token(element, depth - 1) for element in value)
    if depth and type(value) in (set, frozenset):
        return type(value), frozenset(token(element, depth - 1) for element in value)
    if depth and type(value) is dict:
        return dict, tuple((token(key, depth - 1), token(held, depth - 1)) for key, held in value.items())
    return id(value)


def tensors_in(value: Any, depth: int = NESTED) -> Iterator[torch.Tensor]:
    """Return a tensor itself, and of a list, a tuple or a dict the tensors inside."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element, depth - 1)
    elif depth and isinstance(value, dict):
        for held in value.values():
            yield from tensors_in(held, depth - 1)
