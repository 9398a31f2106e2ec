"""The presets under the names by which Bridge's launchers look recipes up: attributes of its recipe packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ....recipes import DERIVED_RECIPES, SMALL_RECIPES
from ...seams.patches import Additions, bridge_release
from ...seams.registry import seam


@dataclass(slots=True)
class AddedNames(Additions):
    """Presets that one upstream module has while the plugin is active.

    Attributes:
        derived: The presets by name that derive from recipes of the release that the seam names.
        own: Those that derive from none.
    """

    derived: Mapping[str, Callable[..., Any]]
    own: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def apply(self, module: ModuleType) -> None:
        """Add the presets once. Names that upstream has itself stay upstream's and are noted in `reason`."""
        if self._owner is module:
            return
        self.revert()
        expected = self.seam.expected_in(bridge_release())
        wanted = {**(self.derived if expected else {}), **self.own}
        taken = [name for name, value in wanted.items() if getattr(module, name, value) is not value]
        self._add(module, {name: value for name, value in wanted.items() if name not in taken})
        self.state = "active" if wanted else "native"
        self.reason = f"upstream has its own {', '.join(taken)}" if taken else ""
        if not expected:
            self.reason = f"presets that derive from recipes of megatron-bridge {self.seam.since} are left out"

    def look(self) -> None:
        """Bring `state` and `reason` up to date with what others did to the module since."""
        if replaced := self._replaced():
            self.state, self.reason = "broken", f"something replaced {', '.join(replaced)} in {self.module}"


# Of the families' packages only Qwen3-VL's is asked for names.
_PRESETS: dict[str, tuple[Mapping[str, Callable[..., Any]], ...]] = {
    "recipe_names": (DERIVED_RECIPES, SMALL_RECIPES),
    "recipe_names.qwen_vl": (DERIVED_RECIPES,),
}
PATCHES = tuple(AddedNames(seam(name), *presets) for name, presets in _PRESETS.items())
