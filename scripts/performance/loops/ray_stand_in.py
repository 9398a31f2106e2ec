"""A module in the place of ray, which verl imports everywhere; its engines alone never call it."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "ray"


class RayStandIn(ModuleType):
    """Has every name that somebody asks for; what is called with a class or function returns it, as decorators do."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _undecorated(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return _undecorated


def stand_in() -> None:
    """Let `import ray` work where ray is not installed."""
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        sys.modules[NAME] = RayStandIn()
