"""The encoders that vision graphs know, and how one is found in a model."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ...options import PROVIDER_FIELDS, OptionError, VisionGraphOptions
from ...vision.adapter import EncoderFamily
from .hugging_face import QWEN25_VL, SIGLIP
from .qwen3_vl import QWEN3_VL, find_vision_model, holders

# Where Bridge's models hold a tower of Hugging Face, the tower's class, and its family.
TOWERS = (
    ("visual", "Qwen2_5_VisionTransformerPretrainedModel", QWEN25_VL),
    ("vision_tower", "SiglipVisionModel", SIGLIP),
)


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
    found = find_vision_model(chunks)
    if found is not None:
        return FoundEncoder(*found, QWEN3_VL)
    for holder in holders(chunks):
        for attribute, name, family in TOWERS:
            for tower in (getattr(holder, attribute, None), holder):
                if isinstance(tower, nn.Module) and name in {base.__name__ for base in type(tower).__mro__}:
                    return FoundEncoder(tower, holder, family)
    return None


def check_modules(options: VisionGraphOptions, family: EncoderFamily) -> None:
    """Refuse graphs of parts of layers where the encoder has none that can be regions.

    Raises:
        OptionError: It has none.
    """
    if not options.whole_encoder and family.pack_segments is None:
        raise OptionError(
            PROVIDER_FIELDS["modules"],
            list(options.modules),
            f"empty with {family.name}'s encoder",
            "Its layers are not megatron-core's; leave the field out for the whole encoder as one region.",
        )
