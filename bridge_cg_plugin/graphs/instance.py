"""One method of a module, replaced on the instance."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class _Method(partial[Any]):
    """What takes a method's place; in a copy of the module, the module's own method is there instead.

    Attributes:
        original: The module's own method, bound.
    """

    original: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


class InstanceMethod:
    """Puts another callable in the place of a module's method, on the instance, until `restore`.

    Args:
        module: The module.
        name: Of the method.
        method: What takes its place.

    Attributes:
        original: The method from before, bound.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self.module, self.name, self._method = module, name, _Method(method)
        self._replaced = module.__dict__.get(name)
        self._method.original = self.original = getattr(module, name)
        setattr(module, name, self._method)

    def restore(self) -> None:
        """Put back what was on the instance, nothing included, unless somebody replaced the method since."""
        if self.module.__dict__.get(self.name) is not self._method:
            return
        if self._replaced is not None:
            setattr(self.module, self.name, self._replaced)
        else:
            del self.module.__dict__[self.name]
