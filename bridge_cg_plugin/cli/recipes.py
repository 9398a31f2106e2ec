"""The command `bridge-cg recipes`."""

import json
import re
import sys
from collections.abc import Iterable, Sequence

from bridge_cg_plugin.recipes import RECIPES

from .answers import Tell
from .recipe_files import RecipeFiles


def run(part: str, as_json: bool, tell: Tell) -> int:
    """Print the names that contain a text; returns 2 if there are none, else 0.

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
    else:
        tell("\n".join(["presets with graphs", *_listed(presets), "recipes of Megatron-Bridge", *_listed(others)]))
    return 0


def recipes_of_bridge() -> set[str]:
    """Return the names of the installed Bridge's recipes."""
    return RecipeFiles().names()


def _matching(part: str, names: Iterable[str]) -> list[str]:
    letters = _letters(part)
    return sorted(name for name in names if letters in _letters(name))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _listed(names: Sequence[str]) -> list[str]:
    return [f"  {name}" for name in names] or ["  none"]
