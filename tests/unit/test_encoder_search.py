"""Towers are found where Bridge's models hold them."""

from torch import nn

from bridge_cg_plugin.upstream.encoders.glm45v import GLM45V
from bridge_cg_plugin.upstream.encoders.pixtral import PIXTRAL
from bridge_cg_plugin.upstream.encoders.qwen3_omni import QWEN3_OMNI, QWEN3_OMNI_AUDIO
from bridge_cg_plugin.upstream.encoders.qwen25_vl import QWEN25_OMNI, QWEN25_VL
from bridge_cg_plugin.upstream.encoders.registry import find_encoder
from bridge_cg_plugin.upstream.encoders.siglip import SIGLIP

from .hugging_face_towers import (
    new_glm45v,
    new_pixtral,
    new_qwen3_omni,
    new_qwen3_omni_audio,
    new_qwen25,
    new_qwen25_omni,
    new_siglip,
)
from .towers import tower


class Holder(nn.Module):
    def __init__(self, name, inner):
        super().__init__()
        setattr(self, name, inner)


def test_towers_are_found_where_bridges_models_hold_them():
    windowed, fixed, bridges = new_qwen25(), new_siglip(), tower()
    for attribute, model, family in (
        ("visual", windowed, QWEN25_VL),
        ("visual", new_glm45v(), GLM45V),
        ("vision_tower", new_pixtral(), PIXTRAL),
        ("visual", new_qwen25_omni(), QWEN25_OMNI),
        ("visual", new_qwen3_omni(), QWEN3_OMNI),
        ("vision_tower", fixed, SIGLIP),
        ("audio_model", new_qwen3_omni_audio(), QWEN3_OMNI_AUDIO),
        ("vision_model", bridges, None),
    ):
        holder = Holder(attribute, model)
        found = find_encoder([nn.Linear(2, 2), Holder("module", holder)])
        assert found.model is model and found.holder is holder
        assert family is None or found.family is family
        assert find_encoder(model).model is model
        for deeper in (Holder("thinker", holder), Holder("module", Holder("module", Holder("model", holder)))):
            found = find_encoder(deeper)
            assert found.model is model and found.holder is holder
    assert find_encoder(Holder("visual", nn.Linear(2, 2))) is None
    assert find_encoder([]) is None
