"""One method of a module, replaced on the instance."""

from collections.abc import Callable
from typing import Any

from torch import nn


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
        self.module, self.name, self._method = module, name, method
        self._replaced = module.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        setattr(module, name, method)

    def restore(self) -> None:
        """Put back what was on the instance, nothing included, unless somebody replaced the method since."""
        if self.module.__dict__.get(self.name) != self._method:
            return
        if self._replaced is not None:
            setattr(self.module, self.name, self._replaced)
        else:
            del self.module.__dict__[self.name]
