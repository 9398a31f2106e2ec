"""Graphs on any recipe: what is set on a configuration, within the limits of a GPU."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import status
from ..options import PROVIDER_FIELDS, GraphOptions, OptionError
from ..options.declaration import parse_choice
from ..options.graph_options import CHOICE, SETTING, SETTINGS
from ..options.normalization import as_fields, settle, splits_deepstack, warn_of_options
from ..options.sources import collect

BRIDGE_RECIPES = "megatron.bridge.recipes"
SINCE = "0.6"
# Tokens (patches) of the largest bucket of vision graphs on each kind of GPU. A slot took 9.2 GiB at 6720 tokens and
# 20.6 GiB at 16384 on an H200 (docs/benchmarks/); the others follow from that line and from what the GPU's memory
# leaves beside weights and optimizer state. Buckets that no microbatch asks for take no memory.
GPUS: Mapping[str, int] = {"h100": 8192, "h200": 16384, "b200": 24576}


def with_graphs(
    recipe: str | Callable[[], Any] | Any,
    *,
    gpu: str = "h100",
    graphs: str = "exact",
    mock_data: bool = False,
    options: Any = None,
) -> Any:
    """Return the configuration of a recipe with CUDA graphs of its vision encoder and its language model.

    Sets `cuda_graphs`, which Bridge's validation resolves to the graphs that the configuration then supports. All else
    is the recipe's, except what graphs need: the limits of the GPU (`GPUS`), `te_rng_tracker`, and
    sums of deepstack gradients under sequence parallelism.

    Args:
        recipe: A Bridge `ConfigContainer`, which is changed; a function that returns one; or a recipe's name.
        gpu: A key of `GPUS`. Limits that the recipe has already stay.
        graphs: The value of `cuda_graphs`; "off" sets nothing else.
        mock_data: Whether to replace the data by Bridge's mock images.
        options: Further graph options as a mapping, words, YAML or `GraphOptions`; they win. With them `cuda_graphs` is
            resolved at once, because a configuration does not keep which fields were written.

    Raises:
        RuntimeError: The plugin is not active: upstream's own vision graphs would compute something else.
        OptionError: There is no such GPU, setting or recipe, the model has no graph options, or they cannot work.
    """
    require_plugin("with_graphs()")
    gpu = parse_choice("gpu", gpu, tuple(GPUS), "Take the one with the memory nearest to yours.")
    written = _written(options)
    graphs = CHOICE.read(written).get("setting") or parse_choice("graphs", graphs, SETTINGS)
    config = _configuration(recipe)
    if not hasattr(config, "model"):
        got = type(config).__name__
        raise OptionError("recipe", got, "a function that returns a ConfigContainer", "Return the configuration.")
    if not hasattr(config.model, SETTING):
        model = type(config.model).__name__
        raise OptionError("recipe", model, "of a model with graph options", "Use a GPT, Mamba or Qwen-VL model.")
    if mock_data:
        config.dataset = mock_dataset(config.dataset)
    if graphs != "off":
        _prepare(config, GPUS[gpu], encoder=written.get(PROVIDER_FIELDS["impl"]) != "none")
    setattr(config.model, SETTING, graphs)
    if written:
        from ..upstream.hooks.graph_fields import set_graphs

        set_graphs(config, options)
    return config


def _written(options: Any) -> Mapping[str, Any]:
    """Return graph options as fields.

    Raises:
        OptionError: They are written in no form that is read here.
    """
    if isinstance(options, GraphOptions):
        return as_fields(options)
    if not isinstance(options, None | str | Path | Mapping | Sequence):
        raise OptionError("options", options, "a mapping, words, YAML or GraphOptions", "Write it as one of these.")
    return collect(options).fields


def _configuration(recipe: Any) -> Any:
    if isinstance(recipe, str):
        from ..upstream.hooks.recipes import build_recipe

        return build_recipe(recipe)
    if hasattr(recipe, "model"):
        return recipe
    if not callable(recipe):
        raise OptionError("recipe", recipe, "a name, a function or a ConfigContainer", "Pass one of these.")
    return recipe()


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
    """Refuse to build a configuration with graphs while the plugin is not active.

    Args:
        name: Of the preset or function.
        instead: A sentence about what to do without the plugin.

    Raises:
        RuntimeError: It is not.
    """
    if not status()["active"]:
        how = "unset BRIDGE_CG_PLUGIN or call bridge_cg_plugin.activate() first."
        raise RuntimeError(f"{name} needs the plugin: {how} {instead}".rstrip())


def _prepare(config: Any, max_seq_length: int, encoder: bool) -> None:
    """Set what graphs need and `cuda_graphs` does not choose.

    Buckets of the recipe beyond the limit are dropped, with a warning that names them.

    Args:
        config: A Bridge `ConfigContainer`.
        max_seq_length: Tokens of the largest bucket of vision graphs, if the recipe does not say.
        encoder: Whether the vision encoder may be on graphs, if the model has one that can.
    """
    model = config.model
    model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    if not (encoder and hasattr(model, PROVIDER_FIELDS["impl"])):
        return
    values: dict[str, Any] = {}
    if getattr(model, PROVIDER_FIELDS["max_seq_length"]) is None:
        values["max_seq_length"] = max_seq_length
    if splits_deepstack(collect(config).facts):
        values["deepstack_gradient_allreduce"] = True
    said = {PROVIDER_FIELDS[name]: value for name, value in values.items()}
    written, dropped = settle(collect(config, said))
    for option in (*values, "buckets"):
        setattr(model, PROVIDER_FIELDS[option], written.fields.get(PROVIDER_FIELDS[option], "auto"))
    warn_of_options(GraphOptions(warnings=dropped))


def mock_dataset(dataset: Any) -> Any:
    """Return Bridge's mock data with every setting that `dataset` has too.

    Raises:
        OptionError: It has no image processor, or this Bridge has no such mock data.
    """
    if not hasattr(dataset, "hf_processor_path"):
        kind = type(dataset).__name__
        raise OptionError(
            "mock_data", True, f"left out with {kind}", "Mock images need a recipe of a model with images."
        )
    mock = getattr(importlib.import_module("megatron.bridge.data.builders"), "MockVLMSFTDatasetConfig", None)
    if mock is None:
        raise OptionError("mock_data", True, "left out here", f"Mock images come with megatron-bridge {SINCE}.")
    names = [field.name for field in dataclasses.fields(mock) if field.init]
    return mock(**{name: getattr(dataset, name) for name in names if hasattr(dataset, name)})
