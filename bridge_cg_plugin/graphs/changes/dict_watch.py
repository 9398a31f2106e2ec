"""Learn of changes of dicts without looking at them: CPython's dict watchers (`PyDict_Watch`, Python 3.12 and later).

A model's modules keep what decides their computation in dicts: attributes, parameters, buffers, submodules, hooks. A
look at all of them before every replay would cost milliseconds. A watched dict calls back when it changes, and costs
nothing while it does not.
"""

import atexit
import ctypes
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any
from weakref import WeakMethod

# Called with a watched dict and a key of it whose value is about to change.
Listener = Callable[[dict[Any, Any], Hashable], None]


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
    """This process's one watcher; use `WATCHER`. It keeps neither dicts nor listeners alive.

    The callback runs while the dict is being changed. It only reads that dict: a listener must not change it.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[WeakMethod[Listener], ...]] = {}
        self._callback = _Callback(self._changes)
        self._number: int | None = None
        self._silent = False

    def watch(self, table: dict[Any, Any], listener: Listener) -> None:
        """Call a bound method before every change of a dict, until `unwatch` or for as long as its object lives."""
        if self._number is None:
            self._number = self._add()
        others = tuple(other for other in self._listeners.get(id(table), ()) if other() not in (None, listener))
        self._listeners[id(table)] = (*others, WeakMethod(listener))
        ctypes.pythonapi.PyDict_Watch(self._number, ctypes.py_object(table))

    def unwatch(self, table: dict[Any, Any], listener: Listener) -> None:
        """Take one listener off a dict."""
        left = tuple(other for other in self._listeners.get(id(table), ()) if other() not in (None, listener))
        if left:
            self._listeners[id(table)] = left
        elif self._listeners.pop(id(table), None):
            ctypes.pythonapi.PyDict_Unwatch(self._number, ctypes.py_object(table))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Tell no listener what happens inside, which others undo: values that stand in for a while."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def _add(self) -> int:
        add = ctypes.pythonapi.PyDict_AddWatcher
        add.argtypes, add.restype = [ctypes.c_void_p], ctypes.c_int
        number: int = add(ctypes.cast(self._callback, ctypes.c_void_p))
        # Modules are freed after the callback's own objects when the interpreter ends.
        atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, number)
        return number

    def _changes(self, event: int, address: int, key: int | None, value: int | None) -> int:
        if event == _Event.DEALLOCATED:
            self._listeners.pop(address, None)
            return 0
        if self._silent:
            return 0
        listeners = self._listeners.get(address, ())
        if listeners:
            table = _object(address)
            for name in _changing(event, table, key):
                for reference in listeners:
                    listener = reference()
                    if listener is not None:
                        listener(table, name)
        return 0


def _changing(event: int, table: dict[Any, Any], key: int | None) -> tuple[Hashable, ...]:
    """Return the keys of an event: one, all that are there, or all that another dict brings."""
    if event in _ONE_KEY:
        return (_object(key),)
    if event == _Event.CLONED:
        return tuple(_object(key))
    return tuple(table)  # cleared


def _object(address: int | None) -> Any:
    return ctypes.cast(ctypes.c_void_p(address), ctypes.py_object).value


WATCHER = DictWatcher()
