"""Recipes with graphs: a function that switches them on in any recipe of Bridge, and presets by name.

    from bridge_cg_plugin.recipes import with_graphs

    config = with_graphs("qwen3_vl_30b_a3b_sft_config", gpu="h200")

While the plugin is active the presets' names are attributes of `megatron.bridge.recipes`, where Bridge's launchers look
recipes up. Imports neither torch nor Megatron; Bridge's recipe is looked up when a preset is called.
"""

from .graphs import GPUS, with_graphs
from .presets import DERIVED_RECIPES, PRESETS, RECIPES, Preset
from .small import SMALL_RECIPES

globals().update(RECIPES)
__all__ = [
    "DERIVED_RECIPES",
    "GPUS",
    "PRESETS",
    "RECIPES",
    "SMALL_RECIPES",
    "Preset",
    "with_graphs",
    *RECIPES,
]
