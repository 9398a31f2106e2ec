"""Graphs on any recipe: what is set on a configuration, within the limits of a GPU."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from .. import status
from ..announce import announce
from ..options import PACKED_FIELDS, PROVIDER_FIELDS, OptionError, facts_of, normalize
from ..options.deepstack import splits_deepstack
from ..options.normalization import warn_once
from ..options.sources import collect
from .gpus import GPUS, Gpu

BRIDGE_RECIPES = "megatron.bridge.recipes"
SINCE = "0.6"


def with_graphs(
    recipe: str | Callable[[], Any] | Any,
    *,
    gpu: str = "h100",
    vision: bool | None = None,
    max_packed_seqs: int | None = None,
    mock_data: bool = False,
    options: Any = None,
) -> Any:
    """Return the configuration of a recipe with CUDA graphs switched on.

    Vision graphs stay within the limits of the GPU (`GPUS`). All else is the recipe's, except what graphs need:
    `te_rng_tracker`, recompute that spares the vision encoder, and sums of deepstack gradients under sequence
    parallelism.

    Args:
        recipe: A Bridge `ConfigContainer`, which is changed; a function that returns one; or a recipe's name.
        gpu: A key of `GPUS`.
        vision: Whether the vision encoder is on graphs; None: if the model has one that can be.
        max_packed_seqs: Documents of one pack that graphs of the language model take, its padding counted as one; None
            leaves the language model as it is.
        mock_data: Whether to replace the data by Bridge's mock images.
        options: Further graph options in any spelling of `options.graph_options`; they win.

    Raises:
        RuntimeError: The plugin is not active: upstream's own vision graphs would compute something else.
        OptionError: There is no such GPU or recipe, the model has no vision encoder that can be on graphs, or the
            options cannot work.
    """
    require_plugin("with_graphs()")
    if gpu not in GPUS:
        raise OptionError("gpu", gpu, " or ".join(GPUS), "Take the one with the memory nearest to yours.")
    config = _configuration(recipe)
    has_encoder = hasattr(config.model, PROVIDER_FIELDS["impl"])
    if vision and not has_encoder:
        model = type(config.model).__name__
        raise OptionError("vision", True, f"False on {model}", "Its provider has no vision encoder for graphs.")
    if has_encoder if vision is None else vision:
        set_vision_fields(config, GPUS[gpu])
    if max_packed_seqs is not None:
        set_packed_fields(config, max_packed_seqs)
    if mock_data:
        config.dataset = mock_dataset(config.dataset)
    if options is not None:
        from ..upstream.hooks.overrides import apply_flags

        apply_flags(config, options)
    return config


def _configuration(recipe: Any) -> Any:
    if isinstance(recipe, str):
        from ..upstream.hooks.recipes import build_recipe

        return build_recipe(recipe)
    return recipe if hasattr(recipe, "model") else recipe()


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


def set_vision_fields(config: Any, gpu: Gpu) -> None:
    """Switch vision graphs on in a Bridge `ConfigContainer`, within a GPU's limits.

    Buckets of the recipe beyond the limit are dropped, with a warning that names them. The first pipeline stage holds a
    microbatch per stage between forward and backward, each in a slot of its own, so they share the memory.
    """
    model = config.model
    values = {
        "impl": "transformer_engine",
        "max_seq_length": gpu.max_seq_length,
        "buckets_max_gb": round(gpu.memory_gb / model.pipeline_model_parallel_size, 2),
    }
    if splits_deepstack(facts_of(collect(config))):
        values["deepstack_gradient_allreduce"] = True
    options, written = normalize(config, {PROVIDER_FIELDS[option]: value for option, value in values.items()})
    for option in (*values, "buckets"):
        setattr(model, PROVIDER_FIELDS[option], written.fields.get(PROVIDER_FIELDS[option], "auto"))
    warn_once(options)
    model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    if model.recompute_granularity == "full":
        _recompute_experts_only(model)


def _recompute_experts_only(model: Any) -> None:
    # Full recompute reaches the vision encoder, which graphs refuse; the encoder has no experts.
    if not getattr(model, "num_moe_experts", None):
        announce("vision CUDA graphs: full recompute is off, of the language model too, which then takes more memory")
    model.recompute_granularity, model.recompute_modules = "selective", ["moe"]
    model.recompute_method = model.recompute_num_layers = None


def set_packed_fields(config: Any, max_packed_seqs: int) -> None:
    """Switch packed-sequence graphs of all layers on in a Bridge `ConfigContainer` whose data are packed."""
    from ..upstream.hooks.graph_fields import pad_offline_packs

    model = config.model
    model.cuda_graph_impl, model.cuda_graph_modules, model.cuda_graph_scope = "transformer_engine", [], None
    setattr(model, PACKED_FIELDS["max_packed_seqs"], max_packed_seqs)
    model.use_te_rng_tracker = config.rng.te_rng_tracker = True
    pad_offline_packs(config)


def mock_dataset(dataset: Any) -> Any:
    """Return Bridge's mock data with every setting that `dataset` has too.

    Raises:
        OptionError: It has no image processor, or this Bridge has no such mock data.
    """
    if not hasattr(dataset, "hf_processor_path"):
        kind = type(dataset).__name__
        raise OptionError("mock_data", True, f"False with {kind}", "Mock images need a recipe of a model with images.")
    mock = getattr(importlib.import_module("megatron.bridge.data.builders"), "MockVLMSFTDatasetConfig", None)
    if mock is None:
        raise OptionError("mock_data", True, "False here", f"Mock images come with megatron-bridge {SINCE}.")
    names = [field.name for field in dataclasses.fields(mock) if field.init]
    return mock(**{name: getattr(dataset, name) for name in names if hasattr(dataset, name)})
