"""What lists, sets and dicts of modules hold, compared by identity and put back."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from .tables import Entry, module_tables
from .values import MISSING, NESTED

# No watcher sees them change.
UNWATCHED = (list, set)
_NESTING = (list, tuple, set, frozenset, dict)


class Held:
    """What lists and sets hold, and those inside them, compared by identity: a model may have hundreds.

    Args:
        values: The lists and sets.
    """

    def __init__(self, values: Iterable[list[Any] | set[Any]]) -> None:
        self._containers = tuple(found for each in values for found in _containers(each))
        self._elements = list(chain.from_iterable(map(_elements, self._containers)))

    def changed(self) -> bool:
        """Whether an element is another object now."""
        return not _same(list(chain.from_iterable(map(_elements, self._containers))), self._elements)


class Contents:
    """What modules hold when the object is made: what is in their dicts, and in lists and sets in attributes.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dicts = [(table.values, dict(table.values)) for m in modules for table in module_tables(m, "")]
        self._others = {
            Entry(id(vars(module)), name): (value, list(value))
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, UNWATCHED)
        }

    def changed(self) -> list[Entry]:
        """Return the attributes whose list or set holds other elements now."""
        return [entry for entry, (values, before) in self._others.items() if not _same(list(values), before)]

    def put_back(self) -> None:
        """Let dicts, lists and sets hold what they held."""
        for table, before in self._dicts:
            for key in table.keys() - before.keys():
                del table[key]
            for key, value in before.items():
                if table.get(key, MISSING) is not value:
                    table[key] = value
        for entry in self.changed():
            values, elements = self._others[entry]
            values.clear()
            values.extend(elements) if isinstance(values, list) else values.update(elements)


def _same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _elements(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if type(container) is dict else container


def _containers(value: Any, depth: int = NESTED) -> Iterator[Any]:
    """Return a container and those that it holds, as deep as `token` looks into it."""
    if not (depth and type(value) in _NESTING):
        return
    yield value
    for element in _elements(value):
        yield from _containers(element, depth - 1)
