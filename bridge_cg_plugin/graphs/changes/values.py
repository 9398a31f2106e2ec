"""What stands for a value: its contents where they are plain, its identity otherwise."""

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MISSING: Any = object()
# How deep containers and objects are compared by what they hold.
NESTED = 3
# The most bytes of an array that are compared.
MOST_BYTES = 1 << 20
# Modules that compute nothing of their own; PEFT makes new ones of the same modules whenever it walks a model.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype)
# Values that are the same where they are equal. Any other value is the same only where it is the same object.
_EQUAL = (*_PLAIN, MethodType)
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, type)
# Objects that are the same where they hold the same.
_RECORDS = (SimpleNamespace, partial)
# Beginnings of Python modules whose objects are looked at from outside only.
_OPAQUE = {*sys.stdlib_module_names, "torch", __name__.partition(".")[0]}


def look_not_into(*modules: str) -> None:
    """Compare objects of classes from some Python modules by identity alone: they are no settings of a model."""
    _OPAQUE.update(modules)
    _fields.cache_clear()


def plain(value: Any) -> bool:
    """Whether a value holds no other object: a number, a text, a type of numbers, a member of an enum or None."""
    return value is None or isinstance(value, _PLAIN)


def plain_or_code(value: Any) -> bool:
    """Whether a value is plain, a function or a class."""
    return plain(value) or isinstance(value, _CODE)


def word(value: Any) -> str:
    """Return a value for a message; of one that is not plain its type."""
    if value is MISSING:
        return "absent"
    return repr(value) if plain(value) else type(value).__name__


@lru_cache(maxsize=1024)
def _fields(kind: type) -> tuple[str, ...] | None:
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


class _Read:
    """What a function returns, read again by every iteration."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def readers(value: Any) -> tuple[Iterable[Any], ...]:
    """Return what gives the elements of a container, an object or an array whenever it is iterated; none for others.

    Elements come in an order that stays.
    """
    kind = type(value)
    if plain(value):
        return ()
    if issubclass(kind, dict):
        return dict.keys(value), dict.values(value)  # live, whatever a subclass makes of them
    if issubclass(kind, (*_SEQUENCES, *_SETS)):
        return (value,)
    if kind is partial:
        return (_Read(lambda: (value.func, *value.args, *value.keywords, *value.keywords.values())),)
    if hasattr(kind, "__array_interface__"):
        return (_Read(lambda: (value.tobytes(),)),) if value.nbytes <= MOST_BYTES else ()
    of_any: Any = kind
    slots = _fields(of_any)
    if slots is None:
        return ()
    read = (_Read(lambda: [getattr(value, name, MISSING) for name in slots]),) if slots else ()
    return (vars(value).values(), *read) if hasattr(value, "__dict__") else read


def elements(value: Any) -> Iterator[Any] | None:
    """Return what a value holds that may be another while the value is the same; None where it is looked at alone."""
    read = readers(value)
    return chain.from_iterable(read) if read else None


def settings_token(config: Any, left_out: Set[str]) -> Hashable:
    """Return what stands for what a configuration holds besides plain fields: code, containers and other settings.

    Args:
        config: The configuration.
        left_out: Fields that are no settings.
    """
    held = {name: value for name, value in vars(config).items() if not plain(value) and name not in left_out}
    tokens = {name: token(value, NESTED - 1, settings=True) for name, value in sorted(held.items())}
    return type(config), tuple((name, stands) for name, stands in tokens.items() if stands is not None)


def token(value: Any, depth: int = NESTED, settings: bool = False) -> Hashable:
    """Return what stands for a value in a state: its contents where they are plain, its identity otherwise.

    Args:
        value: The value.
        depth: How deep to look into containers and objects.
        settings: Whether of objects inside only plain values and code count.
    """
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # two zeros differ, and NaN is itself
    if isinstance(value, _EQUAL):
        return type(value), value
    if type(value) in CONTAINERS:
        return type(value), tuple((name, id(module)) for name, module in value._modules.items())
    held = elements(value) if depth else None
    if held is None:
        return None if settings and not plain_or_code(value) else id(value)
    tokens = (token(each, depth - 1, settings) for each in held)
    if isinstance(value, _SETS):
        return type(value), frozenset(tokens)
    kind: Any = type(value)
    if _fields(kind) is None or isinstance(value, _RECORDS):
        return type(value), tuple(tokens)
    names = tuple(getattr(value, "__dict__", ()))
    same = None if settings or is_dataclass(value) else id(value)
    return type(value), same, names, tuple(tokens)


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
