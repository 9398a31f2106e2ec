"""Patches of upstream attributes: checked before, applied on import, undone without a trace."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

_ABSENT = object()

State = Literal["waiting", "active", "native", "broken", "off"]


class DriftError(RuntimeError):
    """Upstream does not look as a patch expects."""


@dataclass(slots=True)
class Patch:
    """One attribute of one upstream module, replaced while the plugin is active.

    Attributes:
        name: Short name, for `status` and messages.
        module: Module that owns the attribute; the patch is applied when something imports it.
        target: "attribute" or "Class.attribute".
        make: Builds the new value from the old one (None where the attribute is absent).
        purpose: What it is for, in a few words.
        parameters: Parameter names that the old callable must have.
        optional: Whether a release without the attribute simply does not need the patch.
    """

    name: str
    module: str
    target: str
    make: Callable[[Any], Any]
    purpose: str
    parameters: tuple[str, ...] = ()
    optional: bool = False
    state: State = field(default="off", init=False)
    reason: str = field(default="", init=False)
    _owner: Any = field(default=None, init=False, repr=False)
    _raw: Any = field(default=_ABSENT, init=False, repr=False)

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute once. A mismatch is noted in `state` and `reason`, not raised."""
        if self._owner is not None:
            return
        try:
            owner, attribute, old = self._locate(module)
            if old is _ABSENT:
                self.state, self.reason = "native", "this release has no such attribute and needs none"
                return
            self._check(old)
        except DriftError as error:
            self.state, self.reason = "broken", str(error)
            return
        self._owner, self._raw = owner, vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, self.make(old))
        self.state, self.reason = "active", ""

    def revert(self) -> None:
        """Put the attribute back as it was, absent included."""
        if self._owner is not None:
            attribute = self.target.rpartition(".")[2]
            if self._raw is _ABSENT:
                delattr(self._owner, attribute)
            else:
                setattr(self._owner, attribute, self._raw)
        self._owner, self._raw = None, _ABSENT
        self.state, self.reason = "off", ""

    def _locate(self, module: ModuleType) -> tuple[Any, str, Any]:
        path, _, attribute = self.target.rpartition(".")
        owner: Any = module
        for part in filter(None, path.split(".")):
            if not hasattr(owner, part):
                if self.optional:
                    return owner, attribute, _ABSENT
                raise DriftError(f"{self.module} has no {part}")
            owner = getattr(owner, part)
        old = getattr(owner, attribute, _ABSENT)
        if old is _ABSENT and not self.optional:
            raise DriftError(f"{self.module}.{self.target} does not exist")
        return owner, attribute, old

    def _check(self, old: Any) -> None:
        if not self.parameters:
            return
        found = inspect.signature(old).parameters
        missing = [p for p in self.parameters if p not in found]
        if missing:
            raise DriftError(f"{self.module}.{self.target} no longer takes {', '.join(missing)}")
