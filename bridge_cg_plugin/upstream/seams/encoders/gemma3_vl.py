"""Gemma 3's vision tower, SigLIP."""

from . import MODELS, Declaration, HubModels, Model, Seams

_GEMMA_VL = f"{MODELS}.gemma_vl"


def _seams(feature: str) -> Seams:
    from ..seam import read, touched
    from ..tower_seams import FORWARD_OFF

    return (
        read(
            "gemma3_vl_model",
            f"{_GEMMA_VL}.modeling_gemma3_vl:Gemma3VLModel.__init__",
            "the tower is found as `vision_tower`",
            feature,
            uses=("self.vision_tower =",),
        ),
        touched(
            "instance",
            "siglip_forward",
            "transformers.models.siglip.modeling_siglip:SiglipVisionModel.forward",
            "a whole encoder's microbatch replays a graph of this function",
            feature,
            undo=FORWARD_OFF,
            takes="pixel_values interpolate_pos_encoding",
            uses=("last_hidden_state=last_hidden_state", "pooler_output=pooler_output"),
        ),
    )


ENCODER = Declaration(
    name="Gemma 3",
    model=Model(
        module=f"{_GEMMA_VL}.gemma3_vl_provider",
        provider="Gemma3VLModelProvider",
        hub=(HubModels(r"google/gemma-3-(4|12|27)b", encoder=(27, 1152)),),
    ),
    region="siglip:SIGLIP",
    seams=_seams,
)
