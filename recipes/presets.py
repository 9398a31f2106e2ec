"""The presets: what they are called, what they derive from, what they change."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import status
from ..options import PROVIDER_FIELDS, facts_of, normalize
from ..options.deepstack import ALLREDUCE, splits_deepstack
from .gpus import GPUS, Gpu

BRIDGE_RECIPES = "megatron.bridge.recipes"
SINCE = "0.6"

MODELS = (
    "qwen3_vl_8b",
    "qwen3_vl_30b_a3b",
    "qwen3_vl_235b_a22b",
    "qwen35_vl_9b",
    "qwen35_vl_35b_a3b",
    "qwen35_vl_122b_a10b",
    "qwen35_vl_397b_a17b",
)
# (task, whether on mock data). Bridge has pretraining recipes of these models on mock data only.
VARIANTS = (("pretrain", True), ("sft", False), ("sft", True), ("peft", False), ("peft", True))
PACKED_VARIANTS = (("sft_packed", False), ("sft_packed", True))
PACKED_MODELS = ("qwen3_vl_8b",)
# Bridge's adapter recipes of the other models take no scheme: they are LoRA.
SCHEME_MODELS = ("qwen3_vl_8b", "qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One preset.

    Attributes:
        model: The model, as Bridge's recipe names spell it.
        task: "pretrain", "sft", "sft_packed" or "peft".
        gpu: A key of `GPUS`.
        mock: Whether the data are Bridge's mock images.
    """

    model: str
    task: str
    gpu: str
    mock: bool

    @property
    def name(self) -> str:
        """The recipe's name; Bridge's launchers read the model's step and the mode from its parts."""
        return f"{self.model}_vision_graphs_{self.gpu}_{self.task}{'_mock' if self.mock else ''}_config"

    @property
    def base(self) -> str:
        """The name of the recipe of Bridge that it derives from."""
        if self.task == "pretrain":
            return f"{self.model}_pretrain_mock_config"
        return f"{self.model}_{self.task.removesuffix('_packed')}_config"

    @property
    def replaces_data(self) -> bool:
        """Whether Bridge's recipe has other data."""
        return self.mock and not self.base.endswith("_mock_config")


def build(preset: Preset, **arguments: Any) -> Any:
    """Return the Bridge `ConfigContainer` of a preset.

    Args:
        preset: Which one.
        arguments: For Bridge's recipe.

    Raises:
        RuntimeError: The plugin is not active: upstream's own vision graphs would compute something else. Or the
            installed release lacks the recipe.
    """
    config = bridges_recipe(preset.name, preset.base)(**arguments)
    set_graph_fields(config, GPUS[preset.gpu])
    if preset.task == "sft_packed":
        config.dataset.enable_in_batch_packing = True
    if preset.replaces_data:
        config.dataset = mock_dataset(config.dataset)
    return config


def bridges_recipe(name: str, base: str) -> Callable[..., Any]:
    """Return the recipe of Bridge that a preset derives from.

    Args:
        name: Of the preset.
        base: Of Bridge's recipe.

    Raises:
        RuntimeError: The plugin is not active, or the installed release lacks the recipe.
    """
    require_plugin(name, f"Without it, use {base}.")
    recipe: Callable[..., Any] | None = getattr(importlib.import_module(BRIDGE_RECIPES), base, None)
    if recipe is None:
        raise RuntimeError(f"{name} derives from {base}, which comes with megatron-bridge {SINCE}")
    return recipe


def require_plugin(name: str, instead: str = "") -> None:
    """Refuse to build a preset while the plugin is not active.

    Args:
        name: Of the preset.
        instead: A sentence about what to do without the plugin.

    Raises:
        RuntimeError: It is not.
    """
    if not status()["active"]:
        how = "unset BRIDGE_CG_PLUGIN or call bridge_cg_plugin.activate() first."
        raise RuntimeError(f"{name} needs the plugin: {how} {instead}".rstrip())


def set_graph_fields(config: Any, gpu: Gpu) -> None:
    """Switch vision graphs on in a Bridge `ConfigContainer`, within a GPU's limits.

    The first pipeline stage holds a microbatch per stage between forward and backward, each in a slot of its own, so
    they share the memory.
    """
    model = config.model
    values = {
        "impl": "transformer_engine",
        "max_seq_length": gpu.max_seq_length,
        "buckets_max_gb": round(gpu.memory_gb / model.pipeline_model_parallel_size, 2),
    }
    for option, value in values.items():
        setattr(model, PROVIDER_FIELDS[option], value)
    model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    if splits_deepstack(facts_of(normalize(config)[1])):
        setattr(model, ALLREDUCE, True)
    if model.recompute_granularity == "full":
        _recompute_experts_only(model)


def _recompute_experts_only(model: Any) -> None:
    # Full recompute reaches the vision encoder, which graphs refuse; the encoder has no experts.
    model.recompute_granularity, model.recompute_modules = "selective", ["moe"]
    model.recompute_method = model.recompute_num_layers = None


def mock_dataset(dataset: Any) -> Any:
    """Return Bridge's mock data with every setting that `dataset` has too."""
    from megatron.bridge.data.builders import MockVLMSFTDatasetConfig

    names = [field.name for field in dataclasses.fields(MockVLMSFTDatasetConfig) if field.init]
    return MockVLMSFTDatasetConfig(**{name: getattr(dataset, name) for name in names if hasattr(dataset, name)})


def _recipe(preset: Preset) -> Callable[..., Any]:
    """Return the function that builds a preset, with the parameters of Bridge's recipe."""

    def with_scheme(peft_scheme: Any = "lora") -> Any:
        return build(preset, peft_scheme=peft_scheme)

    def plain() -> Any:
        return build(preset)

    takes_scheme = preset.task == "peft" and preset.model in SCHEME_MODELS
    recipe: Callable[..., Any] = with_scheme if takes_scheme else plain
    recipe.__name__ = recipe.__qualname__ = preset.name
    recipe.__module__ = __package__
    data = " on mock data" if preset.replaces_data else ""
    recipe.__doc__ = f"Return Bridge's `{preset.base}`{data} with vision-encoder graphs for {preset.gpu.upper()} GPUs."
    return recipe


PRESETS = tuple(
    Preset(model=model, task=task, gpu=gpu, mock=mock)
    for model in MODELS
    for task, mock in (*VARIANTS, *(PACKED_VARIANTS if model in PACKED_MODELS else ()))
    for gpu in GPUS
)
RECIPES = {preset.name: _recipe(preset) for preset in PRESETS}
