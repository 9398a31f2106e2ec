"""The encoders that vision graphs have an adapter for, and how one is found in a model."""

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint
from typing import NamedTuple

from torch import nn

from ...announce import warn
from ...vision.encoder import EncoderFamily
from ..seams.encoders import DECLARED, GROUP, Declaration, points
from ..wrappers import holders
from .qwen3_vl import QWEN3_VL


def _family(encoder: Declaration) -> EncoderFamily:
    module, _, name = encoder.region.partition(":")
    family: EncoderFamily = getattr(importlib.import_module(f".{module}", __package__), name)
    return family


ENCODERS = (QWEN3_VL, *map(_family, DECLARED))
_failed: set[str] = set()


class FoundEncoder(NamedTuple):
    """An encoder in a model.

    Attributes:
        model: The vision model.
        holder: The module that holds it, or the model itself.
        family: Its family.
    """

    model: nn.Module
    holder: nn.Module
    family: EncoderFamily


@cache
def encoders() -> tuple[EncoderFamily, ...]:
    """Return the encoders in the order in which they are looked for: those of other packages, then this package's."""
    found = map(_load, points())
    return (*(family for family in found if family is not None), *ENCODERS)


def _load(point: EntryPoint) -> EncoderFamily | None:
    """Return what an entry point names; one that fails is logged and left out."""
    try:
        family = point.load()
    except Exception as error:
        warn(f"the encoder {point.value} of the entry point group {GROUP} cannot be imported: {error!r}")
        return None
    if isinstance(family, EncoderFamily):
        return family
    warn(f"{point.value} of the entry point group {GROUP} is {type(family).__name__}, not an EncoderFamily")
    return None


def find_encoders(chunks: nn.Module | Sequence[nn.Module]) -> list[FoundEncoder]:
    """Return the encoder of images and the one of audio that a model has under any wrapper, in this order."""
    found: dict[str, FoundEncoder] = {}
    for family in encoders():
        for holder in holders(chunks) if family.encodes not in found else ():
            if (model := _find(family, holder)) is not None:
                found.setdefault(family.encodes, FoundEncoder(model, holder, family))
    return [found[kind] for kind in ("vision", "audio") if kind in found]


def _find(family: EncoderFamily, holder: nn.Module) -> nn.Module | None:
    """Return what a family finds; one of another package that fails has nothing there."""
    try:
        return family.find(holder)
    except Exception as error:
        if family in ENCODERS:
            raise
        if family.name not in _failed:
            _failed.add(family.name)
            warn(f"the encoder {family.name} of another package cannot be looked for in a model: {error!r}")
        return None
