"""Qwen2.5-Omni's vision tower: Qwen2.5-VL's with three projections in attention."""

from . import MODELS, Declaration, HubModels, Model, Seams
from .qwen25_vl import WINDOW_PARTS, WINDOWS

_OMNI, _TOWER = f"{MODELS}.qwen_omni", "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni"


def _seams(feature: str) -> Seams:
    from ..seam import read
    from ..tower_seams import EMBEDDINGS_READ, layer_seams, rotary_seam, tower_seams

    return (
        read(
            "qwen25_omni_model",
            f"{_OMNI}.modeling_qwen25_omni.thinker_model:Qwen25OmniThinkerModel.forward",
            EMBEDDINGS_READ,
            feature,
            uses=("self.visual(pixel_values, grid_thw=image_grid_thw)", ".pooler_output"),
        ),
        *tower_seams(
            "windowed_omni_tower",
            _TOWER,
            "Qwen2_5OmniVisionEncoder",
            feature,
            WINDOW_PARTS,
            (*WINDOWS, "position_embeddings=rotary_pos_emb"),
        ),
        *layer_seams(
            "windowed_omni",
            _TOWER,
            "Qwen2_5OmniVisionBlock",
            "Qwen2_5OmniVisionAttention",
            feature,
            *("self.q(", "self.k(", "self.v("),
        ),
        read(
            "windowed_omni_rotary",
            f"{_TOWER}:apply_rotary_pos_emb_vision",
            "a region takes cosines and sines once for all layers, and multiplies by them as here",
            feature,
            takes="tensor freqs",
            uses=("tensor * cos + rotate_half(tensor) * sin",),
        ),
        rotary_seam("windowed_omni_queries", feature),
    )


MODEL = Model(
    module=f"{_OMNI}.qwen25_omni_provider",
    provider="Qwen25OmniModelProvider",
    hub=(HubModels(r"Qwen/Qwen2\.5-Omni-"),),
    config_field="thinker_config",
)
ENCODER = Declaration(name="Qwen2.5-Omni", model=MODEL, region="qwen25_omni:QWEN25_OMNI", seams=_seams)
