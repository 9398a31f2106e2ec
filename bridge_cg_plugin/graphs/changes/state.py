"""States of a model: what its modules, their configurations and classes hold, besides memory of parameters.

A *token* stands for a value: its contents where they are plain, its identity otherwise.
"""

import gc
import operator
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..instance import StandIn
from .dict_watch import MISSING, WATCHER

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


# What `tensors_in` looks into.
HOLDING_TENSORS = (torch.Tensor, list, tuple, dict)


def tensors_in(value: Any, depth: int = NESTED) -> Iterator[torch.Tensor]:
    """Return a tensor itself, and of a list, a tuple or a dict the tensors inside."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth - 1)


CONFIG, TRAINING, CLASS = "config", "training", "__class__"
# Dicts of a module that decide which tensors and modules its forward uses.
PARTS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# By attribute; see `token`.
type Tokens = Mapping[str, Any]
# The most changes that a message names.
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Exempt:
    """What may change of a model without changing what it computes, and upstream's functions that may not.

    Attributes:
        bookkeeping: Names of attributes that a train loop writes for its own use.
        own_hook: Whether a module's hook is the model's own code, which is recorded, or does its work elsewhere.
        packages: Of Python, whose own globals and objects other than modules keep tensors of a pass for its backward.
        code: Returns functions that recorded work stands for, each at its place; no watcher sees them replaced.
        put_back: Lets these places hold what `code` returned.
        names: Of these places, for messages. Both grow while modules are imported.
        own_code: Returns one that some modules need and that is not upstream's, in words; None without one.
    """

    bookkeeping: frozenset[str] = frozenset()
    own_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False
    packages: frozenset[str] = frozenset()
    code: Callable[[], list[Any]] = list
    put_back: Callable[[Sequence[Any]], None] = lambda held: None
    names: Sequence[str] = ()
    own_code: Callable[[Iterable[nn.Module]], str | None] = lambda modules: None


NOTHING_EXEMPT = Exempt()


class Left:
    """Stands for what passes of the model left in an attribute: for any value, until somebody else writes others."""

    __slots__ = ("writes",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def __eq__(self, other: object) -> bool:
        return self.writes == (other.writes if isinstance(other, Left) else 0)


class Holder:
    """One module, configuration or class, and what it holds.

    Args:
        owner: The module, configuration or class.
        name: For messages.
        ignored: Attributes that are no part of a state.
        depth: How deep objects in a module's attributes are compared: upstream's are large, and compared by identity.

    Attributes:
        owner, name, ignored: See above.
        tables: Dicts to watch, with the attribute that each is the value of; None for the owner's own.
        tokens: Of each attribute.
        unwatched: Attributes with containers or objects inside, with how `token` looks into them.
        left: Attributes that passes of the model wrote, with how often somebody else wrote a plain value since.
        others: Of a module: those of its configuration and classes.
    """

    def __init__(self, owner: Any, name: str, ignored: Set[str], depth: int) -> None:
        self.owner, self.name, self.ignored, self._depth = owner, name, ignored, depth
        # What earlier passes left of their graphs is no change.
        held = getattr(owner, "__dict__", {}).items() if isinstance(owner, nn.Module) else ()
        self.left = {n: 0 for n, v in held if isinstance(v, Tensor) and v.requires_grad and not v.is_leaf}
        # Containers that no watcher sees change, with the elements that they had when they were last compared.
        self._elements: list[tuple[Any, Sequence[Any]]] | None = None
        self.others: list[Holder] = []
        self.read()

    def read(self) -> None:
        """Read what the owner holds now."""
        self._elements = None
        owner, module = self.owner, isinstance(self.owner, nn.Module)
        self.tables: list[tuple[dict[Any, Any], str | None]] = []
        self.tokens: dict[str, Any] = {}
        self.unwatched: dict[str, tuple[int, bool]] = {}
        kind = isinstance(owner, type)
        own = vars_of(owner)
        self.tables.append((own, None))
        if kind:
            seen = ((name, v) for name, v in own.items() if isinstance(v, FunctionType) or not name.startswith("__"))
            self.tokens |= {name: token(value, 0) for name, value in seen}
        for name, value in () if kind else own.items():
            if name in self.ignored or (module and name in OF_EVERY_MODULE) or type(value) is StandIn:
                continue
            if module and name == CONFIG and is_config(value):
                self.tokens[name] = type(value)
            elif not module:
                self._read(name, value, NESTED - 1, settings=True)
            else:
                self._read(name, value, max(self._depth, isinstance(value, (dict, list, set))))
        if module:
            # Sources compare parameters themselves.
            held = (*owner._buffers.items(), *owner._modules.items())
            self.tokens |= {name: type(parameter) for name, parameter in owner._parameters.items()}
            self.tokens |= {name: token(value) for name, value in held} | {CLASS: type(owner)}
            self.tables += ((getattr(owner, part), None) for part in PARTS)
        self.tokens.update((name, Left(writes)) for name, writes in self.left.items())

    def _read(self, name: str, value: Any, depth: int, settings: bool = False) -> None:
        upstreams = isinstance(value, dict) and not (self._depth or settings)
        stands = (type(value), *map(_entry, value.items())) if upstreams else token(value, depth, settings)
        if stands is None:
            return
        self.tokens[name] = stands
        if isinstance(value, dict) and not settings:
            self.tables.append((value, name))
        if any(not isinstance(each, dict) or each is not value or settings for each in _mutable(value, depth)):
            self.unwatched[name] = depth, settings

    def seen_unwatched(self) -> dict[str, Any]:
        """Return the tokens now of what no watcher sees change."""
        held, read = vars(self.owner), (item for item in self.unwatched.items() if item[0] not in self.left)
        return {name: token(held.get(name, MISSING), *how) for name, how in read}

    def has_changed(self) -> bool:
        """Whether something that no watcher sees is another than when it was read."""
        if self._elements is not None and all(_has(container, elements) for container, elements in self._elements):
            return False
        if any(self.tokens.get(name, MISSING) != stands for name, stands in self.seen_unwatched().items()):
            return True
        self._elements = [(each, _elements_of(each)) for each in self._unwatched_containers()]
        return False

    def _unwatched_containers(self) -> Iterator[Any]:
        for name, (depth, _) in self.unwatched.items():
            if name not in self.left:
                yield from _mutable(vars(self.owner).get(name), depth)

    def left_inside(self, before: Tokens) -> list[str]:
        """Return what a pass has changed of what `seen_unwatched` returned before it; lists only where they grow."""
        now = self.seen_unwatched()
        changed = (name for name in now.keys() | before.keys() if not _alike(before, now, name))
        return [name for name in changed if not _is_as_long(before.get(name), now.get(name))]

    def containers(self) -> Iterator[tuple[str, Any]]:
        """Yield the dicts, lists and sets that no watcher sees change, with the attribute that they are in."""
        for name, (depth, _) in self.unwatched.items():
            found = _mutable(vars(self.owner).get(name), depth)
            yield from ((name, each) for each in found if type(each) in (dict, list, set))


def _mutable(value: Any, depth: int) -> Iterator[Any]:
    """Yield what `inside` does and what can change by itself: what a tuple holds is among it."""
    return (each for each in inside(value, depth) if not isinstance(each, (tuple, frozenset)))


def _entry(item: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a token of an entry of upstream's, which makes equal recipes of fp8, and lists of them, anew."""
    key, value = item
    if type(value) is list and value and all(map(is_dataclass, value)):
        return key, (list, *(token(each) for each in value))
    return key, token(value, NESTED if is_dataclass(value) and not isinstance(value, type) else 0)


def _elements_of(container: Any) -> Sequence[Any]:
    if isinstance(container, (dict, MappingProxyType)):
        return [*container.keys(), *container.values()]
    return tuple(held(container) or ())


def _has(container: Any, elements: Sequence[Any]) -> bool:
    """Whether the elements are the same objects."""
    now = container if type(container) is list else _elements_of(container)
    return len(now) == len(elements) and all(map(operator.is_, now, elements))


def vars_of(owner: Any) -> dict[str, Any]:
    """Return the dict of an object's or a class's attributes; a class shows a view of it, which cannot be watched."""
    held: dict[str, Any] = gc.get_referents(vars(owner))[0] if isinstance(owner, type) else vars(owner)
    return held


def is_config(value: Any) -> bool:
    """Whether an attribute's value is a configuration, which many modules have."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))


class State:
    """What some holders hold: recordings are made for one state.

    Args:
        held: Tokens of attributes, under the holder's name.
    """

    def __init__(self, held: Iterable[tuple[str, Tokens]]) -> None:
        self._names, self._tokens = zip(*held, strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State) or len(self._tokens) != len(other._tokens):
            return False
        # Most are the same object.
        return self._tokens == other._tokens or all(
            ours is theirs or all(_alike(ours, theirs, name) for name in ours.keys() | theirs.keys())
            for ours, theirs in zip(self._tokens, other._tokens, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def changes_from(self, before: "State") -> list[str]:
        """Return the attributes that are others than in a state before, behind their holders' names."""
        then, found = dict(zip(before._names, before._tokens, strict=True)), []
        for holder, now in zip(self._names, self._tokens, strict=True):
            old = then.get(holder, now)
            changed = [name for name in {**old, **now} if old is not now and not _alike(old, now, name)]
            for name in [CLASS] if CLASS in changed else changed:
                found.append(f"{holder}: {name}")
        return found


def _is_as_long(before: Any, now: Any) -> bool:
    lists = [each[1] for each in (before, now) if isinstance(each, tuple) and each[0] in (list, set)]
    return len(lists) == 2 and len(lists[0]) == len(lists[1])


def _alike(one: Tokens, other: Tokens, name: str) -> bool:
    return bool(one.get(name, MISSING) == other.get(name, MISSING))


def listed(texts: Sequence[str]) -> str:
    """Return changed attributes in words as one text, the first few of them."""
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return "; ".join(texts[:MOST_NAMED]) + more


class Contents:
    """What holders hold when the object is made.

    Args:
        tables: Dicts, each with its holder and the attribute that it is the value of; None for the holder's own.
        holders: Those with containers inside attributes that no watcher sees change.
    """

    def __init__(self, tables: Sequence[tuple[Holder, str | None, Any]], holders: Iterable[Holder]) -> None:
        self._places = [*tables, *((holder, *each) for holder in holders for each in holder.containers())]
        self._before = [dict(each) if isinstance(each, dict) else list(each) for *_, each in self._places]

    def _replaced(self) -> Iterator[tuple[Holder, str | None, Any, Any]]:
        """Yield what holds other objects now, with those from before."""
        for place, before in zip(self._places, self._before, strict=True):  # thousands, and nearly all hold the same
            now = place[2]
            same = len(now) == len(before) and all(map(operator.is_, now, before))
            if not (same and (isinstance(before, list) or all(map(operator.is_, now.values(), before.values())))):
                yield *place, before

    def changed(self) -> dict[str, bool]:
        """Return the attributes that hold something else now, and whether each holds a plain value or tensors."""
        found: dict[str, bool] = {}
        for holder, attribute, container, before in self._replaced():
            for key, now in _differences(container, before):
                name = key if attribute is None else attribute
                if name in holder.ignored or name == TRAINING:
                    continue
                value = now if attribute is None else vars(holder.owner).get(attribute)
                leaves = plain(value) or any(True for _ in tensors_in(value))
                found.setdefault(f"{holder.name}: {name}", leaves)
        return found

    def put_back(self) -> None:
        """Let dicts, lists and sets hold what they held, without taking it for a change of the model."""
        with WATCHER.silent():
            for *_, container, before in self._replaced():
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)


def _differences(container: Any, before: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a dict whose values are others than before, with these; of a list or set one key."""
    if not isinstance(container, dict):
        yield "", container
        return
    for key in before.keys() | container.keys():
        old, now = before.get(key, MISSING), container.get(key, MISSING)
        if old is not now and token(old) != token(now):
            yield key, now
