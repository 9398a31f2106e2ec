"""Nemotron Omni's vision encoder: megatron-core's RADIO on images of any size."""

from . import MODELS, Declaration, HubModels, Model, Seams
from .nemotron_vl import radio_seams

_NEMOTRON_OMNI = f"{MODELS}.nemotron_omni"


def _seams(feature: str) -> Seams:
    return radio_seams("nemotron_omni", feature)


ENCODER = Declaration(
    name="Nemotron Omni",
    model=Model(
        module=f"{_NEMOTRON_OMNI}.nemotron_omni_provider",
        provider="NemotronOmniModelProvider",
        hub=(HubModels(r"nvidia/Nemotron-3-Nano-Omni-\d+B-A\d+B", experts=128, encoder=(32, 1280)),),
        config_field="vision_model_type",
        steps=(),
    ),
    region="radio:PACKED_RADIO",
    seams=_seams,
)
