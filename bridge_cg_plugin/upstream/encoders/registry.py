"""The encoders that vision graphs know, and how one is found in a model."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ...options import PROVIDER_FIELDS, OptionError, VisionGraphOptions
from ...vision.adapter import EncoderFamily
from ..wrappers import holders
from .qwen3_vl import QWEN3_VL
from .qwen25_vl import QWEN25_VL
from .siglip import SIGLIP

ENCODERS = (QWEN3_VL, QWEN25_VL, SIGLIP)


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


def find_encoder(chunks: nn.Module | Sequence[nn.Module]) -> FoundEncoder | None:
    """Return the encoder of a model under any wrapper, None on a stage without one that graphs know."""
    for family in ENCODERS:
        for holder in holders(chunks):
            model = family.find(holder)
            if model is not None:
                return FoundEncoder(model, holder, family)
    return None


def check_modules(options: VisionGraphOptions, family: EncoderFamily) -> None:
    """Refuse graphs of parts of layers where the encoder has none that can be regions.

    Raises:
        OptionError: It has none.
    """
    if not options.whole_encoder and family.layer_parts is None:
        raise OptionError(
            PROVIDER_FIELDS["modules"],
            list(options.modules),
            f"empty with {family.name}'s encoder",
            "Its layers are not megatron-core's; leave the field out for the whole encoder as one region.",
        )
