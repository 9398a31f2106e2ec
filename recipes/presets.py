"""The presets: what they are called, what they derive from, what they change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..options import PROVIDER_FIELDS
from .graphs import bridges_recipe, with_graphs
from .small import SMALL_RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One recipe of Bridge with graphs.

    Attributes:
        name: The preset's name; Bridge's launchers read the model's step and the mode from its parts.
        base: The name of Bridge's recipe.
        gpu: The GPU whose limits it has.
        fields: Further fields of the model's provider.
    """

    name: str
    base: str
    gpu: str = "h200"
    fields: Mapping[str, Any] = field(default_factory=dict)


# Offloading holds twice as many tokens as an H100 does without it. Its slot was planned for 8192 tokens' memory.
_OFFLOAD = {
    PROVIDER_FIELDS["max_seq_length"]: 16384,
    PROVIDER_FIELDS["offload_above_gb"]: 14.0,
}
PRESETS = (
    Preset(name="qwen3_vl_8b_vision_graphs_h200_sft_config", base="qwen3_vl_8b_sft_config"),
    Preset(name="qwen3_vl_8b_vision_graphs_h200_peft_config", base="qwen3_vl_8b_peft_config"),
    Preset(name="qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config", base="qwen3_vl_8b_pretrain_mock_config"),
    Preset(
        name="qwen3_vl_8b_vision_graphs_offload_h100_sft_config",
        base="qwen3_vl_8b_sft_config",
        gpu="h100",
        fields=_OFFLOAD,
    ),
    Preset(name="qwen3_vl_30b_a3b_vision_graphs_h200_sft_config", base="qwen3_vl_30b_a3b_sft_config"),
    Preset(name="qwen35_vl_9b_vision_graphs_h200_sft_config", base="qwen35_vl_9b_sft_config"),
)


def recipe_of(preset: Preset) -> Callable[[], Any]:
    """Return the function that builds a preset.

    It raises `RuntimeError` where the plugin is not active, or the installed release lacks the recipe.
    """

    def recipe() -> Any:
        config = with_graphs(bridges_recipe(preset.name, preset.base), gpu=preset.gpu)
        for name, value in preset.fields.items():
            setattr(config.model, name, value)
        return config

    recipe.__name__ = recipe.__qualname__ = preset.name
    recipe.__module__ = __package__
    said = [f"Return Bridge's `{preset.base}` with graphs: `with_graphs({preset.base}, gpu={preset.gpu!r})`"]
    said += [f"`{name}={value!r}`" for name, value in preset.fields.items()]
    recipe.__doc__ = f"{', '.join(said)}."
    return recipe


DERIVED_RECIPES = {preset.name: recipe_of(preset) for preset in PRESETS}
RECIPES = DERIVED_RECIPES | SMALL_RECIPES
