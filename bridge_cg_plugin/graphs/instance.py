"""A module's `forward`, replaced on the instance."""

from collections.abc import Callable
from typing import Any

from torch import nn


class InstanceForward:
    """Puts another `forward` on one module until `restore`.

    Attributes:
        original: The forward from before, bound.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward
        self._replaced = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        module.forward = forward

    def restore(self) -> None:
        """Put back what was on the instance, nothing included, unless somebody replaced the forward since."""
        if self._module.__dict__.get("forward") != self._forward:
            return
        if self._replaced is not None:
            self._module.forward = self._replaced
        else:
            del self._module.__dict__["forward"]
