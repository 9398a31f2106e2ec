"""What a plan takes from a recipe."""

import os
import socket
import urllib.request
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge_cg_plugin.cli.planner.images import Processor
from bridge_cg_plugin.cli.planner.records import (
    DENSE,
    TOWER,
    Costs,
    NotMeasured,
    Ranks,
    language_model_of,
    of_encoder,
    of_language_model,
    ranks_of,
)
from bridge_cg_plugin.options import GraphOptions, OptionError, VisionGraphOptions
from bridge_cg_plugin.options.layout import RankLayout
from bridge_cg_plugin.upstream.hooks.configuration.recipes import no_configuration

from .command import built, resolved, without_imports
from .forecast import differences
from .models import QWEN3_VL, QWEN25_VL, QWEN35_VL, Encoder, encoder_of

# Pixels between which Bridge's `qwen2_5_collate_fn` has a processor keep images, and sides of patches.
_LIMITS = {"min_pixels": 200_704, "max_pixels": 1_003_520}
PATCHES = {QWEN3_VL: 16, QWEN35_VL: 16, QWEN25_VL: 14}
# Fields of providers that have the sizes of patches.
_FIELDS = {"patch": "patch_size", "merge": "spatial_merge_size", "temporal": "temporal_patch_size"}


def processor_of(config: Any, encoder: Encoder) -> Processor:
    """Return the sizes that the provider and the data have; what they lack is of Bridge's or of the encoder's kind.

    Args:
        config: A Bridge `ConfigContainer`.
        encoder: Its model's, of a kind in `PATCHES`.
    """
    held = {name: getattr(config.model, field, None) for name, field in _FIELDS.items()}
    data = getattr(getattr(config, "dataset", None), "task_encoder", None)
    held |= {name: getattr(data, name, None) for name in _LIMITS}
    sizes = {name: size for name, size in held.items() if isinstance(size, int)}
    return Processor(**{"patch": PATCHES[encoder.family], **_LIMITS, **sizes})


SECONDS = 3.0


def check_hub(recipe: str, models: Iterable[str]) -> None:
    """Refuse a recipe of a model whose configuration is neither cached nor within reach.

    Args:
        recipe: The recipe's name.
        models: The names on the hub, or folders, of its models.

    Raises:
        OptionError: There is such a model.
    """
    if not all(map(_is_cached, models)) and not _is_reachable():
        raise OptionError.because("recipe", f"Cannot build recipe {recipe}: {no_configuration(recipe)}")


def _is_cached(model: str) -> bool:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    found = (cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")
    return Path(model).exists() or any(found)


def _is_reachable() -> bool:
    """Return whether the hub answers, or a proxy is set, behind which only a request would tell."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if urllib.request.getproxies():
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        address = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection(address, timeout=SECONDS).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PackedRecipe:
    """What a plan of packed documents takes from a recipe.

    Attributes:
        layout: How its ranks share packs.
        tokens: Of a pack; None where documents are not packed offline.
        costs: What packs cost its language model.
    """

    layout: RankLayout
    tokens: int | None
    costs: Costs


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """What a plan of images takes from a recipe.

    Attributes:
        processor: How its images become patches.
        costs: What microbatches cost its vision encoder.
    """

    processor: Processor
    costs: Costs


def packed_recipe(name: str) -> PackedRecipe:
    """Return what a plan of packed documents takes from a recipe.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    config, options = _read(name)
    model = config.model
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    return PackedRecipe(layout, getattr(specs, "packed_sequence_size", None), _costs_of_packs(config, options))


def _costs_of_packs(config: Any, options: GraphOptions | None) -> Costs:
    packed = options is not None and options.packed.enabled
    modules = [module.name for module in options.language_model.modules] if options is not None and packed else []
    try:
        model = language_model_of(config.model)
    except NotMeasured as why:
        return Costs(of_language_model(DENSE, Ranks())[0], "this language model", [str(why)])
    found, ranks = of_language_model(model, ranks_of(config.model), modules)
    return Costs(found, str(model), _not_measured(ranks))


def vision_recipe(name: str) -> VisionRecipe:
    """Return what a plan of images takes from a recipe.

    Raises:
        OptionError: There is no such recipe, it cannot be built, or the sizes of its patches are not known.
    """
    config, options = _read(name)
    encoder = encoder_of(getattr(config, "model", None))
    if encoder is None or encoder.family not in PATCHES:
        raise OptionError.because("recipe", _refusal(name, encoder))
    vision = VisionGraphOptions() if options is None else options.vision
    (measured,) = of_encoder(str(encoder), vision.kernels) or of_encoder(TOWER, vision.kernels)
    others = differences(config, vision, measured.kernels, measured.attention)
    return VisionRecipe(processor_of(config, encoder), Costs([measured], str(encoder), _not_measured(others)))


def _read(name: str) -> tuple[Any, GraphOptions | None]:
    """Return a recipe's configuration and its options; None for options that training would refuse.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    asked = without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name, asked is not None)
        try:
            return config, resolved(config, {}, (), asked is not None)
        except OptionError:
            return config, None


def _not_measured(others: Sequence[str]) -> list[str]:
    return [f"not measured: {', '.join(others)}"] if others else []


def _refusal(name: str, encoder: Encoder | None) -> str:
    return (
        f"Cannot plan for --recipe {name}: its vision encoder must be of {', '.join(PATCHES)}, whose patches are "
        f"known here; it has {'none' if encoder is None else f'a {encoder}'}. Remove --recipe"
    )
