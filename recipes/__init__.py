"""Presets: Bridge's recipes of the Qwen3-VL family with vision-encoder graphs, one function per model, task and GPU.

And of language models that train on packed documents, with their layers on graphs; and a small model to try out.

    from bridge_cg_plugin.recipes import qwen3_vl_8b_vision_graphs_h200_sft_config

While the plugin is active the same names are attributes of `megatron.bridge.recipes`, where Bridge's launchers look
recipes up. Imports neither torch nor Megatron; Bridge's recipe is looked up when a preset is called.
"""

from .gpus import GPUS, Gpu
from .packed import PACKED_PRESETS, PACKED_RECIPES, PackedPreset
from .presets import PRESETS, RECIPES, Preset
from .small import SMALL_RECIPES

globals().update(RECIPES | PACKED_RECIPES | SMALL_RECIPES)
__all__ = [
    "GPUS",
    "PACKED_PRESETS",
    "PACKED_RECIPES",
    "PRESETS",
    "RECIPES",
    "SMALL_RECIPES",
    "Gpu",
    "PackedPreset",
    "Preset",
    *RECIPES,
    *PACKED_RECIPES,
    *SMALL_RECIPES,
]
