"""Qwen2.5-VL's vision tower, most of whose layers attend inside windows."""

from . import MODELS, Declaration, HubModels, Model, Seams

_QWEN_VL = f"{MODELS}.qwen_vl"
TOWER = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
# Alike in the Omni model's tower.
WINDOWS = ("self.fullatt_block_indexes", "cu_seqlens=cu_seqlens_now")
WINDOW_PARTS = ("window_size", "patch_size")


def _seams(feature: str) -> Seams:
    from ..seam import read
    from ..tower_seams import EMBEDDINGS_READ, layer_seams, rotary_seam, tower_seams

    return (
        read(
            "qwen25_vl_model",
            f"{_QWEN_VL}.modeling_qwen25_vl:Qwen25VLModel.forward",
            EMBEDDINGS_READ,
            feature,
            uses=("self.get_image_features(", ".pooler_output"),
        ),
        *tower_seams(
            "windowed_tower",
            TOWER,
            "Qwen2_5_VisionTransformerPretrainedModel",
            feature,
            WINDOW_PARTS,
            (*WINDOWS, "position_embeddings=position_embeddings"),
        ),
        *layer_seams(
            "windowed",
            TOWER,
            "Qwen2_5_VLVisionBlock",
            "Qwen2_5_VLVisionAttention",
            feature,
            "self.qkv(",
        ),
        rotary_seam("windowed_rotary", feature),
    )


ENCODER = Declaration(
    name="Qwen2.5-VL",
    model=Model(
        module=f"{_QWEN_VL}.qwen25_vl_provider",
        provider="Qwen25VLModelProvider",
        hub=(HubModels(r"Qwen/Qwen2\.5-VL-[37]B", encoder=(32, 1280)), HubModels(r"Qwen/Qwen2\.5-VL-")),
    ),
    region="qwen25_vl:QWEN25_VL",
    seams=_seams,
)
