"""Which encoders a model's provider brings, and whether graphs have an adapter for them.

Imports neither torch nor Megatron: `bridge-cg explain` asks.
"""

import os
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ...options.facts import IMAGE_FIELDS
from .encoders import declared
from .registry.models import QWEN3_VL

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


NO_ADAPTER = "without an adapter for vision graphs"
HOW_TO_ADD = "docs/adding_an_encoder.md shows how to write one"


def encoder_of(model: Any) -> str:
    """Return the vision encoder of a model's provider in words; empty where it has none, or nothing is known of it."""
    bases = [base.__name__ for base in type(model).__mro__]
    others = {provider for _, provider in other_providers()}
    mine = _adapters()
    for name in bases:
        if name in others:
            return f"of {name}, with an adapter of another package for vision graphs"
        if name in mine:
            return f"{mine[name]}'s, with an adapter for vision graphs"
    if not any(hasattr(model, field) for field in IMAGE_FIELDS):
        return ""
    if not bases[0].endswith("Provider"):  # `bridge-cg explain` does without the hub
        listed = "docs/encoders.md lists those that vision graphs take"
        return f"of a kind that only the hub tells; {listed}, {HOW_TO_ADD}"
    return f"of {bases[0]}, {NO_ADAPTER}: it runs eager; {HOW_TO_ADD}"


def has_audio_encoder(model: Any) -> bool:
    """Whether a model's provider brings an audio encoder that graphs have an adapter for."""
    bases = {base.__name__ for base in type(model).__mro__}
    return any(one.encodes == "audio" and one.model.provider in bases for one in declared())


def taken_encoders() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the encoders that this package has an adapter for, and provider -> adapter of other packages."""
    mine = ("Qwen3-VL", *(one.name if one.encodes == "vision" else f"{one.name} (audio)" for one in declared()))
    return mine, {point.name.rpartition(".")[2]: point.value for point in points()}


def _adapters() -> dict[str, str]:
    """Return provider -> encoder, for those that this package has an adapter for."""
    towers = {one.model.provider: one.name for one in declared() if one.encodes == "vision"}
    return dict.fromkeys(QWEN3_VL, "Qwen3-VL") | towers
