"""Learn of changes of dicts without looking at them: CPython's dict watchers (`PyDict_Watch`, Python 3.12 and later).

A model's modules keep what decides their computation in dicts: attributes, parameters, buffers, submodules, hooks. A
look at all of them before every replay would cost milliseconds. A watched dict calls back when it changes, and costs
nothing while it does not.
"""

import atexit
import ctypes
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Any

# Called with a watched dict and a key of it whose value is about to change.
Listener = Callable[[dict, Hashable], None]


class _Event(IntEnum):
    """CPython's `PyDict_WatchEvent`."""

    ADDED = 0
    MODIFIED = 1
    DELETED = 2
    CLONED = 3
    CLEARED = 4
    DEALLOCATED = 5


_ONE_KEY = frozenset((_Event.ADDED, _Event.MODIFIED, _Event.DELETED))
_Callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class DictWatcher:
    """This process's one watcher; use `WATCHER`.

    The callback runs while the dict is being changed. It only reads that dict: a listener must not change it.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[dict, tuple[Listener, ...]]] = {}
        self._callback = _Callback(self._changes)
        self._number: int | None = None

    def watch(self, table: dict, listener: Listener) -> None:
        """Call `listener` before every change of a dict until `unwatch`; the dict is kept alive."""
        if self._number is None:
            self._number = self._add()
        _, listeners = self._watched.get(id(table), (table, ()))
        self._watched[id(table)] = table, (*listeners, listener)
        ctypes.pythonapi.PyDict_Watch(self._number, ctypes.py_object(table))

    def unwatch(self, table: dict, listener: Listener) -> None:
        """Take one listener off a dict."""
        _, listeners = self._watched[id(table)]
        left = tuple(other for other in listeners if other != listener)
        if left:
            self._watched[id(table)] = table, left
            return
        ctypes.pythonapi.PyDict_Unwatch(self._number, ctypes.py_object(table))
        del self._watched[id(table)]

    def _add(self) -> int:
        add = ctypes.pythonapi.PyDict_AddWatcher
        add.argtypes, add.restype = [ctypes.c_void_p], ctypes.c_int
        number = add(ctypes.cast(self._callback, ctypes.c_void_p))
        # Modules are freed after the callback's own objects when the interpreter ends.
        atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, number)
        return number

    def _changes(self, event: int, address: int, key: int | None, value: int | None) -> int:
        entry = self._watched.get(address)
        if entry is None:
            return 0
        table, listeners = entry
        for name in _changing(event, table, key):
            for listener in listeners:
                listener(table, name)
        return 0


def _changing(event: int, table: dict, key: int | None) -> tuple[Hashable, ...]:
    """Return the keys of an event: one, all that are there, or all that another dict brings."""
    if event in _ONE_KEY:
        return (_object(key),)
    if event == _Event.CLONED:
        return tuple(_object(key))
    return tuple(table) if event == _Event.CLEARED else ()


def _object(address: int | None) -> Any:
    return ctypes.cast(address, ctypes.py_object).value


WATCHER = DictWatcher()
