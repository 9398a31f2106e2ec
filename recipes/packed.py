"""Presets of language models that train on packed documents, with their layers on graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..options import PACKED_FIELDS
from .presets import bridges_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPreset:
    """One preset: Bridge's fine-tuning recipe of a model that packs its data, on packed-sequence graphs.

    Attributes:
        model: The model, as Bridge's recipe names spell it.
        max_packed_seqs: Documents of one pack that a graph takes, its padding counted as one.
    """

    model: str
    max_packed_seqs: int

    @property
    def name(self) -> str:
        """The recipe's name; Bridge's launchers read the mode from its parts."""
        return f"{self.model}_packed_graphs_sft_config"

    @property
    def base(self) -> str:
        """The name of the recipe of Bridge that it derives from."""
        return f"{self.model}_sft_config"


# Bridge's recipes of language models pack SQuAD, whose documents have some 200 tokens and seldom fewer than 64, into
# 2048 tokens. That of Qwen3-VL joins a microbatch of 2 samples; there is room for 8. For other data
# `bridge-cg plan packed` recommends the bound.
PACKED_PRESETS = (
    PackedPreset(model="nemotron_3_nano_4b", max_packed_seqs=32),
    PackedPreset(model="qwen3_8b", max_packed_seqs=32),
    PackedPreset(model="qwen3_vl_8b", max_packed_seqs=8),
)


def build_packed(preset: PackedPreset) -> Any:
    """Return the Bridge `ConfigContainer` of a preset.

    Raises:
        RuntimeError: The plugin is not active: upstream's graphs refuse packed documents. Or the installed release
            lacks the recipe.
    """
    config = bridges_recipe(preset.name, preset.base)()
    set_packed_fields(config, preset.max_packed_seqs)
    return config


def set_packed_fields(config: Any, max_packed_seqs: int) -> None:
    """Switch packed-sequence graphs of all layers on in a Bridge `ConfigContainer` whose data are packed."""
    model = config.model
    model.cuda_graph_impl, model.cuda_graph_modules, model.cuda_graph_scope = "transformer_engine", [], None
    setattr(model, PACKED_FIELDS["max_packed_seqs"], max_packed_seqs)
    model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    if (specs := getattr(config.dataset, "offline_packing_specs", None)) is not None:
        # Bridge asks for both where graphs are on and data are packed offline.
        config.dataset.pad_to_max_length = specs.pad_cu_seqlens = True


def _recipe(preset: PackedPreset) -> Callable[[], Any]:
    """Return the function that builds a preset."""

    def recipe() -> Any:
        return build_packed(preset)

    recipe.__name__ = recipe.__qualname__ = preset.name
    recipe.__module__ = __package__
    recipe.__doc__ = f"Return Bridge's `{preset.base}` with packed-sequence graphs."
    return recipe


PACKED_RECIPES = {preset.name: _recipe(preset) for preset in PACKED_PRESETS}
