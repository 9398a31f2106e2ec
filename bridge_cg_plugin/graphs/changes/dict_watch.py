"""Learn of writes to dicts without looking at them: CPython's dict watchers (`PyDict_Watch`, Python 3.12 and later).

A model's modules keep what decides their computation in dicts: attributes, parameters, buffers, submodules, hooks. A
watched dict calls back before it changes, and costs nothing while it does not.
"""

import atexit
import ctypes
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakMethod

# Called with a watched dict, a key whose value is about to change, and the new value; `MISSING` where it is not known.
Listener = Callable[[dict[Any, Any], Hashable, Any], None]
MISSING: Any = object()
# Of CPython's `PyDict_WatchEvent`. The others are of one key.
_CLONED, _CLEARED, _DEALLOCATED = 3, 4, 5
# From Python 3.13 on values of an object's attributes may lie in the object, whose writes then pass its dict by.
_VALUES_IN_OBJECTS = sys.version_info[:2] >= (3, 13)
_Callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class DictWatcher:
    """This process's one watcher; use `WATCHER`. It keeps neither dicts nor listeners alive.

    The callback runs while the dict is being changed. It only reads that dict: a listener must not change it.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[WeakMethod[Listener], ...]] = {}
        self._callback = _Callback(self._changes)
        self._number: int | None = None
        self._silent = 0

    def watch(self, table: dict[Any, Any], listener: Listener) -> None:
        """Call a bound method before every change of a dict, until `unwatch` or for as long as its object lives."""
        if self._number is None:
            self._number = self._add()
        if _VALUES_IN_OBJECTS and type(table) is dict and id(table) not in self._listeners:
            table["__bridge_cg__"] = None
            table.popitem()  # gives the dict values of its own
        self._listeners[id(table)] = (*self._others(table, listener), WeakMethod(listener))
        ctypes.pythonapi.PyDict_Watch(self._number, ctypes.py_object(table))

    def unwatch(self, table: dict[Any, Any], listener: Listener) -> None:
        """Take one listener off a dict."""
        if others := self._others(table, listener):
            self._listeners[id(table)] = others
        elif self._listeners.pop(id(table), None):
            ctypes.pythonapi.PyDict_Unwatch(self._number, ctypes.py_object(table))

    def _others(self, table: dict[Any, Any], listener: Listener) -> tuple[WeakMethod[Listener], ...]:
        return tuple(other for other in self._listeners.get(id(table), ()) if other() not in (None, listener))

    def silent(self) -> AbstractContextManager[None]:
        """Tell no listener what happens inside, which others undo: values that stand in for a while."""
        return self  # a capture enters it a thousand times, and a generator's context takes microseconds

    def __enter__(self) -> None:
        self._silent += 1

    def __exit__(self, *raised: object) -> None:
        self._silent -= 1

    def _add(self) -> int:
        add = ctypes.pythonapi.PyDict_AddWatcher
        add.argtypes, add.restype = [ctypes.c_void_p], ctypes.c_int
        number: int = add(ctypes.cast(self._callback, ctypes.c_void_p))
        # Modules are freed after the callback's own objects when the interpreter ends.
        atexit.register(ctypes.pythonapi.PyDict_ClearWatcher, number)
        return number

    def _changes(self, event: int, address: int, key: int | None, value: int | None) -> int:
        if event == _DEALLOCATED:
            self._listeners.pop(address, None)
        elif not self._silent and (listeners := self._listeners.get(address)):
            table, new = _object(address), MISSING if value is None else _object(value)
            # All that another dict brings, all that are there, or one.
            names = {_CLONED: lambda: _object(key), _CLEARED: lambda: table}.get(event, lambda: (_object(key),))()
            for listener in filter(None, [reference() for reference in listeners]):
                for name in tuple(names):
                    listener(table, name, new)
        return 0


def _object(address: int | None) -> Any:
    return ctypes.cast(ctypes.c_void_p(address), ctypes.py_object).value


WATCHER = DictWatcher()
