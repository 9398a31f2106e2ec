"""The presets under the names by which Bridge's launchers look recipes up: attributes of its recipe packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..recipes import RECIPES
from .patches import State

_ABSENT = object()


@dataclass(slots=True)
class AddedNames:
    """Attributes that one upstream module has while the plugin is active. Nothing of upstream's is replaced.

    Attributes:
        name: Short name, for `status` and messages.
        module: Module that gets them; they are added when something imports it.
        values: The attributes.
        purpose: What they are for, in a few words.
    """

    name: str
    module: str
    values: Mapping[str, Callable[..., Any]]
    purpose: str
    state: State = field(default="off", init=False)
    reason: str = field(default="", init=False)
    _owner: ModuleType | None = field(default=None, init=False, repr=False)
    _added: list[str] = field(default_factory=list, init=False, repr=False)

    def apply(self, module: ModuleType) -> None:
        """Add the attributes once. Names that upstream has itself stay upstream's and are noted in `reason`."""
        if self._owner is not None:
            return
        taken = [name for name, value in self.values.items() if getattr(module, name, value) is not value]
        self._owner, self._added = module, [name for name in self.values if name not in taken]
        for name in self._added:
            setattr(module, name, self.values[name])
        self.state = "active"
        self.reason = f"upstream has its own {', '.join(taken)}" if taken else ""

    def revert(self) -> None:
        """Remove what was added; what somebody put in its place since stays."""
        for name in self._added:
            if vars(self._owner).get(name, _ABSENT) is self.values[name]:
                delattr(self._owner, name)
        self._owner, self._added = None, []
        self.state, self.reason = "off", ""


# The launchers look in the first; upstream's performance scripts look in the package of a model family.
PATCHES = tuple(
    AddedNames(name, module, RECIPES, "presets are found by name where Bridge's own recipes are")
    for name, module in (
        ("recipe_names", "megatron.bridge.recipes"),
        ("recipe_names.qwen_vl", "megatron.bridge.recipes.qwen_vl"),
    )
)
