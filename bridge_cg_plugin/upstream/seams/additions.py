"""Attributes that upstream's modules and classes have while the plugin is active."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .patches import AtSeam

_ABSENT = object()


@dataclass(slots=True)
class Additions(AtSeam):
    """Attributes that an owner at a seam gets by name. Nothing of upstream's is replaced."""

    _owner: Any = field(default=None, init=False, repr=False)
    _added: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)

    def _add(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Set attributes of an owner that hold nothing of upstream's."""
        self._owner, self._added = owner, values
        for name, value in values.items():
            setattr(owner, name, value)

    def revert(self) -> None:
        """Remove what was added; what somebody put in its place since stays."""
        replaced = self._replaced()
        for name in self._added:
            if name not in replaced:
                delattr(self._owner, name)
        self._owner, self._added = None, {}
        self.state, self.reason = "off", ""

    def _replaced(self) -> list[str]:
        """Return the names that hold something else now, or nothing."""
        return [name for name, value in self._added.items() if vars(self._owner).get(name, _ABSENT) is not value]
