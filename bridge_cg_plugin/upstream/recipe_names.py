"""The presets under the names by which Bridge's launchers look recipes up: attributes of its recipe packages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from ..recipes import PRESETS, RECIPES
from .patches import State
from .registry import SEAMS
from .seams import Seam

_ABSENT = object()
BASES = {preset.name: preset.base for preset in PRESETS}


@dataclass(slots=True)
class AddedNames:
    """Presets that one upstream module has while the plugin is active. Nothing of upstream's is replaced.

    Attributes:
        seam: The module that gets them when something imports it.
        bases: Name of each preset -> name of the recipe it derives from; a release without it does without the preset.
        state: "waiting" until upstream's module is imported, then what became of it.
        reason: Why, where that is not obvious.
    """

    seam: Seam
    bases: Mapping[str, str]
    state: State = field(default="off", init=False)
    reason: str = field(default="", init=False)
    _owner: ModuleType | None = field(default=None, init=False, repr=False)
    _added: list[str] = field(default_factory=list, init=False, repr=False)

    @property
    def name(self) -> str:
        """The seam's name."""
        return self.seam.name

    @property
    def module(self) -> str:
        """The seam's module."""
        return self.seam.module

    def apply(self, module: ModuleType) -> None:
        """Add the presets once. Names that upstream has itself stay upstream's and are noted in `reason`."""
        if self._owner is module:
            return
        self.revert()
        wanted = [name for name, base in self.bases.items() if hasattr(module, base)]
        taken = [name for name in wanted if getattr(module, name, RECIPES[name]) is not RECIPES[name]]
        self._owner, self._added = module, [name for name in wanted if name not in taken]
        for name in self._added:
            setattr(module, name, RECIPES[name])
        self.state = "active" if wanted else "native"
        self.reason = "" if wanted else "this release has no recipe to derive from"
        if taken:
            self.reason = f"upstream has its own {', '.join(taken)}"

    def revert(self) -> None:
        """Remove what was added; what somebody put in its place since stays."""
        for name in self._added:
            if vars(self._owner).get(name, _ABSENT) is RECIPES[name]:
                delattr(self._owner, name)
        self._owner, self._added = None, []
        self.state, self.reason = "off", ""

    def look(self) -> None:
        """Bring `state` and `reason` up to date with what others did to the module since."""
        gone = [name for name in self._added if vars(self._owner).get(name, _ABSENT) is not RECIPES[name]]
        if gone:
            self.state, self.reason = "broken", f"something replaced {', '.join(gone)} in {self.module}"


PATCHES = tuple(AddedNames(seam, BASES) for seam in SEAMS if seam.patched_by == "recipe_names")
