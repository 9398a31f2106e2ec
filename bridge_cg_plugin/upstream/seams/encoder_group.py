"""Encoders of other packages: the entry points that name them. Imports neither torch nor those packages."""

import os
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

# An entry point's name is the class of the model's provider, its value the `EncoderFamily`.
GROUP = "bridge_cg_plugin.encoders"


@cache
def points() -> tuple[EntryPoint, ...]:
    """Return the entry points of the group."""
    return tuple(entry_points(group=GROUP)) if any(map(_may_declare, sys.path)) else ()


def other_providers() -> tuple[tuple[str, str], ...]:
    """Return module and class of the providers that entry points name."""
    paths = (point.name.rpartition(".") for point in points())
    return tuple((module, provider) for module, _, provider in paths if module)


def _may_declare(place: str) -> bool:
    """Whether a distribution at a place of `sys.path` may name the group.

    The plugin is loaded in every process that imports PyTorch, where `entry_points` would take most of its time.
    """
    try:
        with os.scandir(place or os.curdir) as found:
            folders = [entry.path for entry in found if entry.name.endswith((".dist-info", ".egg-info"))]
    except FileNotFoundError:
        return False
    except OSError:  # an archive, say: only importlib looks into it
        return True
    return any(map(_names_the_group, folders))


def _names_the_group(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as file:
            return GROUP in file.read()
    except OSError:
        return False
