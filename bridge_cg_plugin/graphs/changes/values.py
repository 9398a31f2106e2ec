"""Tokens: what stands for a value, its contents where they are plain, its identity otherwise."""

import sys
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import nn

from .dict_watch import MISSING

# How deep containers and objects are compared by what they hold; larger ones and larger arrays by identity.
NESTED, MOST_INSIDE, MOST_BYTES = 3, 256, 1 << 20
# Modules that compute nothing of their own; PEFT makes new ones of the same modules whenever it walks a model.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype)
# Values that are the same where they are equal. Any other value is the same only where it is the same object.
_EQUAL = (*_PLAIN, MethodType)
_SETS = (set, frozenset)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, type)
# Objects that are the same where they hold the same.
_RECORDS = (SimpleNamespace, partial)
# Beginnings of Python modules whose objects are looked at from outside only.
_OPAQUE = {*sys.stdlib_module_names, "torch", __name__.partition(".")[0]}


class Same:
    """Stands for an object that equals only itself, and keeps it: no other object takes its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other.value is self.value if isinstance(other, Same) else NotImplemented

    def __hash__(self) -> int:
        return id(self.value)


def look_not_into(*modules: str) -> None:
    """Compare objects of classes from some Python modules by identity alone: they are no settings of a model."""
    _OPAQUE.update(modules)
    _slots.cache_clear()


def plain(value: Any) -> bool:
    """Whether a value holds no other object: a number, a text, a type of numbers, a member of an enum or None."""
    return value is None or isinstance(value, _PLAIN)


def word(stands: Any) -> str:
    """Return what a token stands for, for a message; of a value that is not plain its type."""
    if stands is MISSING:
        return "absent"
    if isinstance(stands, (ref, Same)):
        value = stands() if isinstance(stands, ref) else stands.value
        return str(value) if value is None else type(value).__name__
    if not isinstance(stands, tuple):
        return str(getattr(stands, "__name__", stands))
    kind, held = stands[:2]
    if issubclass(kind, _PLAIN):
        return str(held) if issubclass(kind, (float, complex)) else repr(held)
    return str(kind.__name__)


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...] | None:
    """Return the slots of objects of a class that are looked into, None for any other."""
    if kind is SimpleNamespace:
        return ()
    if issubclass(kind, (nn.Module, torch.Tensor, *_EQUAL, *_CODE)):
        return None
    names = kind.__module__.split(".")
    if any(".".join(names[: end + 1]) in _OPAQUE for end in range(len(names))):
        return None
    slots = chain.from_iterable(vars(base).get("__slots__", ()) for base in kind.__mro__)
    named = tuple(name for name in slots if not name.startswith("__"))
    return named if named or kind.__dictoffset__ else None


def held(value: Any) -> Sequence[Any] | None:
    """Return the elements of a container, an object or an array, in an order that stays; None for any other value."""
    kind: Any = type(value)
    if plain(value):
        return None
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value)]  # whatever a subclass makes of them
    if issubclass(kind, (list, tuple, deque, *_SETS)):
        return tuple(value)
    if kind is partial:
        return [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if hasattr(kind, "__array_interface__"):
        return [value.tobytes()] if value.nbytes <= MOST_BYTES else None
    if (slots := _slots(kind)) is None:
        return None
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, MISSING) for name in slots)]


def token(value: Any, depth: int = NESTED, settings: bool = False) -> Hashable:
    """Return what stands for a value: equal tokens mean that a model computes the same.

    Args:
        value: The value.
        depth: How deep to look into containers and objects.
        settings: Whether of objects inside only plain values and code count; None stands for any other.
    """
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # two zeros differ, and NaN is itself
    if isinstance(value, _EQUAL):
        return type(value), value
    if type(value) in CONTAINERS:
        return type(value), tuple((name, token(module, 0)) for name, module in value._modules.items())
    elements = held(value) if depth else None
    if elements is None or len(elements) > MOST_INSIDE:
        if settings and not (value is None or isinstance(value, _CODE)):
            return None
        return ref(value) if isinstance(value, nn.Module) else Same(value)
    tokens = (token(each, depth - 1, settings) for each in elements)
    if isinstance(value, _SETS):
        return type(value), frozenset(tokens)
    kind: Any = type(value)
    if _slots(kind) is None or isinstance(value, _RECORDS):
        return kind, tuple(tokens)
    names = tuple(getattr(value, "__dict__", ()))
    return kind, tuple(tokens), names, None if settings or is_dataclass(value) else Same(value)


def inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield a container or an object and those inside it, as deep as `token` looks into it."""
    if depth and (elements := held(value)) is not None and len(elements) <= MOST_INSIDE:
        yield value
        for each in elements:
            yield from inside(each, depth - 1)


def tensors_in(value: Any, depth: int = NESTED) -> Iterator[torch.Tensor]:
    """Return a tensor itself, and of a list, a tuple or a dict the tensors inside."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth - 1)
