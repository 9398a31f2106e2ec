"""The command `bridge-cg recipes`."""

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.upstream.hooks.recipes import PACKAGES

from .answers import Tell

RECIPE = re.compile(r"(?:^def | as )([a-z]\w*_config)\b", re.MULTILINE)


def run(part: str, as_json: bool, tell: Tell) -> int:
    """Print the names that contain a text; returns 2 if there are none, else 0.

    Args:
        part: The text.
        as_json: Whether to print JSON.
        tell: Prints the answer.
    """
    presets = sorted(name for name in RECIPES if part in name)
    others = sorted(name for name in recipes_of_bridge() if part in name)
    if not presets and not others:
        print(f"Cannot find a recipe with {part!r} in its name.", file=sys.stderr)
        return 2
    if as_json:
        tell(json.dumps({"presets": presets, "recipes": others}))
    else:
        tell("\n".join(["presets with graphs", *_listed(presets), "recipes of Megatron-Bridge", *_listed(others)]))
    return 0


def recipes_of_bridge() -> set[str]:
    """Return the names of the installed Bridge's recipes, read from its files: importing them takes half a minute."""
    found = importlib.util.find_spec("megatron")
    roots = [] if found is None else list(found.submodule_search_locations or ())
    folders = [Path(root, *package.split(".")[1:]) for root in roots for package in PACKAGES]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {name for file in files for name in RECIPE.findall(file.read_text(encoding="utf-8"))}


def _listed(names: Sequence[str]) -> list[str]:
    return [f"  {name}" for name in names] or ["  none"]
