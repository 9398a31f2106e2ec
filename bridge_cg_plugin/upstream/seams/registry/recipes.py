"""Seams of Bridge's recipe packages, where launchers look recipes up by name."""

from ..seam import Feature, touched

RECIPES = "megatron.bridge.recipes"
NAMES_BY_TASK = "0.6.2"  # the first release whose recipes of these models the presets derive from

SEAMS = tuple(
    touched(
        "extended",
        name,
        f"{module}",
        "presets are found by name where Bridge's own recipes are",
        Feature.RECIPES,
        undo="deactivate() takes the names off",
        patched_by="hooks.configuration.recipe_names",
        since=NAMES_BY_TASK,
    )
    for name, module in (("recipe_names", RECIPES), ("recipe_names.qwen_vl", f"{RECIPES}.qwen_vl"))
)
