"""Whether two models are of the same code and settings, so that with equal tensors they compute alike."""

import hashlib
import sys
from collections.abc import Hashable, Iterable
from functools import partial, reduce
from itertools import count
from logging import Logger
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .model_watch import NOTHING_EXEMPT, Exempt
from .tables import OF_EVERY_MODULE
from .values import NESTED, plain

# Of code and classes that no name leads to, such as lambdas.
_numbers = count()
_numbered: "WeakKeyDictionary[CodeType | type, int]" = WeakKeyDictionary()


def likeness(roots: Iterable[nn.Module], exempt: Exempt = NOTHING_EXEMPT) -> bytes:
    """Return a digest of classes, functions and plain values of modules, in attributes and in objects that these hold.

    Modes and the content of tensors are no part of it. Objects that are neither are described by their class and what
    their attributes hold, as deep as a state of the model looks.

    Args:
        roots: The modules, with all below them.
        exempt: Attributes that are no part of it either: bookkeeping and labels.
    """
    digest = hashlib.sha256()
    seen: dict[int, Hashable] = {}
    for root in roots:
        for name, module in root.named_modules():
            own = {key: value for key, value in vars(module).items() if _computes(module, key, value, exempt)}
            digest.update(repr((name, _named(type(module)), _described(own, NESTED + 1, seen))).encode())
    return digest.digest()


def _computes(module: nn.Module, name: str, value: Any, exempt: Exempt) -> bool:
    """Whether an attribute may be part of what a module computes."""
    return not (name in OF_EVERY_MODULE or name in exempt.bookkeeping or exempt.label(module, name, value))


def _described(value: Any, depth: int, seen: dict[int, Hashable]) -> Hashable:
    if plain(value):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape)
    if isinstance(value, (type, BuiltinFunctionType)):
        return _named(value)
    kind = _named(type(value))
    if isinstance(value, Logger):
        return kind, value.name  # it also holds which levels somebody has asked for
    if not depth or isinstance(value, nn.Module):
        return kind
    within = partial(_described, depth=depth - 1, seen=seen)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return _named(value), within((cells, value.__defaults__, value.__kwdefaults__))
    if isinstance(value, MethodType):
        return kind, _named(type(value.__self__)), within(value.__func__)
    if isinstance(value, partial):
        return kind, within(value.func), within(value.args), within(value.keywords)
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(within, value))
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted(map(repr, map(within, value))))
    if isinstance(value, dict):
        return kind, tuple((within(key), within(held)) for key, held in value.items())
    if id(value) not in seen:  # a configuration is held by every module
        seen[id(value)] = kind, within(dict(getattr(value, "__dict__", {})))
    return seen[id(value)]


def _named(value: Any) -> Hashable:
    """Return the name that leads to a function or class; where none does, also a number of its code or its own."""
    module, name = str(value.__module__), value.__qualname__
    found = reduce(lambda holder, part: getattr(holder, part, None), name.split("."), sys.modules.get(module))
    own = getattr(value, "__code__", value)
    if found is not value and isinstance(own, (type, CodeType)):
        return module, name, _numbered.setdefault(own, next(_numbers))
    return module, name
