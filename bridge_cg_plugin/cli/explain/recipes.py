"""Bridge's recipes in a process that imports neither PyTorch nor most of Megatron: built and listed."""

import importlib.util
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin.cli.answers import Tell
from bridge_cg_plugin.options import GraphOptions, OptionError
from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.upstream.hooks.overrides import resolve
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe, recipe_names
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


def without_imports() -> None:
    """Switch the plugin on, with stand-ins in the place of Bridge's imports; beside PyTorch all is as it is."""
    bridge_cg_plugin.activate()
    if "torch" in sys.modules and not standins.installed():
        return
    logging.disable(logging.ERROR)
    standins.install()
    patch_other_providers()  # what stands in for Bridge's models is never imported
    models.replace_auto_bridge()


def built(name: str) -> Any:
    """Return a recipe's configuration.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    try:
        return build_recipe(name)
    except OptionError as error:
        if error.__cause__ is None or not standins.installed():
            raise
        advice = "bridge-cg train --dry-run imports Bridge and builds it as training does."
        raise OptionError.because("recipe", f"{error} It was read without Bridge's imports. {advice}") from error


def resolved(config: Any, flags: Mapping[str, Any] | None = None, words: Sequence[str] = ()) -> GraphOptions:
    """Return the graph options of a configuration, with flags and words applied to it.

    Args:
        config: A Bridge `ConfigContainer`.
        flags: Fields of the model and what was written.
        words: Hydra-style `section.name=value`.

    Raises:
        OptionError: Training would refuse the result.
    """
    with redirect_stdout(io.StringIO()):  # training would print there what the answer has
        return resolve(config, flags or {}, words, standins.set_words if standins.installed() else None)


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
    return sorted(name for name in names if _letters(part) in _letters(name))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()
