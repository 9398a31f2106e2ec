"""What attributes of modules hold, compared by identity and put back."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

from torch import nn

from .tables import OF_EVERY_MODULE, Entry, module_tables
from .values import MISSING, NESTED, elements, plain, readers

# No watcher sees them change.
UNWATCHED = (list, set)
# The most containers and objects that are looked at inside one value.
MOST_INSIDE = 256
# Behind the elements of each.
END = (object(),)


class Held:
    """What some values hold, and containers and objects inside them, compared by identity: a model may have hundreds.

    Args:
        values: Containers and objects.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = {id(each): each for each in values}
        read = [
            (number, reader)
            for number, value in self._values.items()
            for container in _containers(value)
            for reader in readers(container)
        ]
        self._owners, self._readers = [number for number, _ in read], [reader for _, reader in read]
        self._first = self.now()
        # Where one ends counts: an element may move to the next.
        self._joined = tuple(chain.from_iterable((reader, END) for reader in self._readers))
        self._elements = list(chain.from_iterable(self._joined))

    def now(self) -> list[list[Any]]:
        """Return what is held, container by container."""
        return list(map(list, self._readers))

    def changed(self, before: Sequence[Sequence[Any]] | None = None) -> set[int]:
        """Return the identities of those values that hold another object than before, or than at first."""
        # Before every replay outside of steps: no line of Python for each, and little memory.
        if before is None and _same(list(chain.from_iterable(self._joined)), self._elements):
            return set()
        found = zip(self._owners, self.now(), self._first if before is None else before, strict=True)
        return {owner for owner, elements, earlier in found if not _same(elements, earlier)}


def is_followed(value: Any) -> bool:
    """Whether something inside a value can change that no watcher sees: a dict of a module's own is watched."""
    inside = (each for each in _containers(value) if not isinstance(each, (tuple, frozenset)))
    return any(each is not value or not isinstance(each, dict) for each in inside)


class Contents:
    """What modules hold when the object is made: what is in their dicts, and in lists and sets in attributes.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dicts = [(table.values, dict(table.values)) for m in modules for table in module_tables(m, "")]
        values = {
            Entry(id(vars(module)), name): value
            for module in modules
            for name, value in vars(module).items()
            if name not in OF_EVERY_MODULE and not plain(value)
        }
        # Many modules may hold one value, as their configuration.
        inside = {number: list(_noted(value)) for number, value in {id(v): v for v in values.values()}.items()}
        self._others = [(entry, *held) for entry, value in values.items() for held in inside[id(value)]]

    def changed(self) -> list[Entry]:
        """Return the attributes in which a container that no watcher sees holds other elements now."""
        changed = (e for e, now, _, before in self._others if not _same(list(_elements(now)), before))
        return list(dict.fromkeys(changed))

    def put_back(self) -> None:
        """Let dicts, lists and sets hold what they held, in each other, too."""
        for table, before in self._dicts:
            for key in table.keys() - before.keys():
                del table[key]
            for key, value in before.items():
                if table.get(key, MISSING) is not value:
                    table[key] = value
        for _, container, before, held in self._others:
            if not _same(list(_elements(container)), held):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)


def _same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    if len(objects) != len(others):
        return False
    if all(map(operator.is_, objects, others)):
        return True
    different = [pair for pair in zip(objects, others, strict=True) if pair[0] is not pair[1]]
    return all(type(now) is bytes and now == then for now, then in different)  # an array's content


def _elements(container: Any) -> Iterable[Any]:
    return elements(container) or ()


def _noted(value: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Return each container that no watcher sees, with a copy and what it holds now."""
    return ((container, copy(container), list(_elements(container))) for container in _unwatched(value))


def _unwatched(value: Any) -> Iterator[Any]:
    """Return a list or a set, and what can be changed inside it or inside a dict or a tuple."""
    if isinstance(value, UNWATCHED):
        yield value
    inside = (each for each in _containers(value) if each is not value)
    yield from (each for each in inside if type(each) in (list, set, dict))


def _containers(value: Any) -> list[Any]:
    """Return a container or an object and those that it holds, as deep as `token` looks into it."""
    found, level = [], [value]
    for _ in range(NESTED):
        level = [each for each in level if readers(each)]
        found += level
        if not level or len(found) > MOST_INSIDE:
            break
        level = list(chain.from_iterable(map(_elements, level)))
    return found[:MOST_INSIDE]
