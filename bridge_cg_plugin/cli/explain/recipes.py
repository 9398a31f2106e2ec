"""Bridge's recipes in a process that imports neither PyTorch nor most of Megatron: built, listed, and for plans."""

import importlib.util
import io
import json
import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import bridge_cg_plugin
from bridge_cg_plugin.cli.answers import Tell
from bridge_cg_plugin.cli.measured import (
    ALONE,
    DENSE,
    Costs,
    NotMeasured,
    differences,
    layers_of,
    of_language_model,
    pack_size,
    ranks_of,
)
from bridge_cg_plugin.options import GraphOptions, OptionError
from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.upstream.hooks.overrides import resolve
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe, no_configuration, recipe_names
from bridge_cg_plugin.upstream.seams.activation import patch_other_providers

from ..planner.plan import RankLayout
from . import models, standins


def require_bridge(recipe: str, otherwise: str = "") -> None:
    """Refuse a recipe where Bridge is not installed.

    Raises:
        OptionError: Says what to install.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        why = f"megatron-bridge is not installed. Install it: pip install 'bridge-cg-plugin[stack]'{otherwise}."
        raise OptionError.because("recipe", f"Cannot build recipe {recipe}: {why}")


def without_imports() -> list[str] | None:
    """Switch the plugin on, with stand-ins in the place of Bridge's imports.

    Returns:
        The models that recipes will take, by their names on the hub; None beside PyTorch, where all is as it is.
    """
    bridge_cg_plugin.activate()
    if "torch" in sys.modules and not hasattr(sys.modules["torch"], "__stand_in__"):
        return None
    logging.disable(logging.ERROR)
    standins.install()
    patch_other_providers()  # what stands in for Bridge's models is never imported
    return models.replace_auto_bridge()


def built(name: str, stands_in: bool) -> Any:
    """Return a recipe's configuration.

    Args:
        name: Of the recipe.
        stands_in: Whether Bridge's imports were replaced.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    try:
        return build_recipe(name)
    except OptionError as error:
        if not stands_in or error.__cause__ is None:
            raise
        advice = "bridge-cg train --dry-run imports Bridge and builds it as training does."
        raise OptionError.because("recipe", f"{error} It was read without Bridge's imports. {advice}") from error


def resolved(config: Any, flags: Mapping[str, Any], words: Sequence[str], stands_in: bool) -> GraphOptions:
    """Return the graph options of a configuration, with flags and words applied to it.

    Args:
        config: A Bridge `ConfigContainer`.
        flags: Fields of the model and what was written.
        words: Hydra-style `section.name=value`.
        stands_in: Whether it was built from stand-ins, which Hydra cannot hold.

    Raises:
        OptionError: Training would refuse the result.
    """
    with redirect_stdout(io.StringIO()):  # training would print there what the answer has
        return resolve(config, flags, words, standins.set_words if stands_in else None)


SECONDS = 3.0


def check_hub(recipe: str, names: Iterable[str]) -> None:
    """Refuse a recipe of a model whose configuration is neither cached nor within reach.

    Args:
        recipe: The recipe's name.
        names: The names on the hub, or folders, of its models.

    Raises:
        OptionError: There is such a model.
    """
    if not all(map(_is_cached, names)) and not _is_reachable():
        raise OptionError.because("recipe", f"Cannot build recipe {recipe}: {no_configuration(recipe)}")


def _is_cached(model: str) -> bool:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    found = (cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")
    return Path(model).exists() or any(found)


def _is_reachable() -> bool:
    """Return whether the hub answers, or a proxy is set, behind which only a request would tell."""
    import urllib.request  # takes as long as the rest of the command line

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


def run(part: str, as_json: bool, tell: Tell) -> int:
    """Print the recipes whose names contain a text; returns 2 if there are none, else 0.

    Args:
        part: The text, in any case and with any separators.
        as_json: Whether to print JSON.
        tell: Prints the answer.
    """
    presets, others = (_matching(part, names) for names in (RECIPES, recipes_of_bridge()))
    if not presets and not others:
        remedy = "Write another part of it; bridge-cg recipes lists all."
        print(f"Cannot find a recipe with {part!r} in its name. {remedy}", file=sys.stderr)
        return 2
    if as_json:
        tell(json.dumps({"presets": presets, "recipes": others}))
        return 0
    for title, names in (("presets with graphs", presets), ("recipes of Megatron-Bridge", others)):
        tell("\n".join([title, *(f"  {name}" for name in names or ["none"])]))
    return 0


def recipes_of_bridge() -> set[str]:
    """Return the names of the installed Bridge's recipes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without_imports()
        return recipe_names() - set(RECIPES)


def _matching(part: str, names: Iterable[str]) -> list[str]:
    letters = _letters(part)
    return sorted(name for name in names if letters in _letters(name))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def packed_recipe(name: str) -> tuple[RankLayout, int | None, Costs]:
    """Return how a recipe's ranks share packs, a pack's tokens (None: not packed offline), and what packs cost.

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
    packed = options is not None and options.packed.enabled
    modules = [module.name for module in options.language_model.modules] if options is not None and packed else []
    try:
        layers = layers_of(model)
    except NotMeasured as why:
        return layout, pack_size(config), Costs(of_language_model(DENSE, {}), "this language model", [str(why)])
    found = of_language_model(layers, ranks_of(model), modules)
    return layout, pack_size(config), Costs(found, layers, differences(config, {**ALONE, **found.ranks}))


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
