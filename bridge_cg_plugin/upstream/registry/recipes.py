"""Seams of Bridge's recipe packages, where launchers look recipes up by name."""

from ..releases import RELEASES
from ..seams import Seam

RECIPES = "megatron.bridge.recipes"
NAMES_BY_TASK = "0.6.2"  # the first release whose recipes of these models the presets derive from

SEAMS = tuple(
    Seam(
        name=name,
        module=module,
        target="",
        kind="module",
        touch="extended",
        purpose="presets are found by name where Bridge's own recipes are",
        since=since,
        undo="deactivate() takes the names off",
        patched_by="recipe_names",
    )
    for name, module, since in (
        ("recipe_names", RECIPES, NAMES_BY_TASK),
        ("recipe_names.qwen_vl", f"{RECIPES}.qwen_vl", NAMES_BY_TASK),
        ("recipe_names.small", RECIPES, RELEASES[-1].bridge),
    )
)
