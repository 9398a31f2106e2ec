"""The presets under the names by which Bridge's launchers look recipes up: attributes of its recipe packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..recipes import PACKED_RECIPES, RECIPES, SMALL_RECIPES
from .patches import AtSeam, bridge_release
from .registry import SEAMS

_ABSENT = object()


@dataclass(slots=True)
class AddedNames(AtSeam):
    """Presets that one upstream module has while the plugin is active. Nothing of upstream's is replaced.

    Attributes:
        values: The presets by name.
    """

    values: Mapping[str, Callable[..., Any]]
    _owner: ModuleType | None = field(default=None, init=False, repr=False)
    _added: list[str] = field(default_factory=list, init=False, repr=False)

    def apply(self, module: ModuleType) -> None:
        """Add the presets once. Names that upstream has itself stay upstream's and are noted in `reason`."""
        if self._owner is module:
            return
        self.revert()
        if not self.seam.expected_in(bridge_release()):
            self.state, self.reason = "native", f"the presets derive from recipes of megatron-bridge {self.seam.since}"
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

    def look(self) -> None:
        """Bring `state` and `reason` up to date with what others did to the module since."""
        gone = [name for name in self._added if vars(self._owner).get(name, _ABSENT) is not self.values[name]]
        if gone:
            self.state, self.reason = "broken", f"something replaced {', '.join(gone)} in {self.module}"


# Of the families' packages only Qwen3-VL's is asked for names.
_VALUES = {
    "recipe_names": RECIPES | PACKED_RECIPES,
    "recipe_names.qwen_vl": RECIPES,
    "recipe_names.small": SMALL_RECIPES,
}
PATCHES = tuple(AddedNames(seam, _VALUES[seam.name]) for seam in SEAMS if seam.patched_by == "recipe_names")
