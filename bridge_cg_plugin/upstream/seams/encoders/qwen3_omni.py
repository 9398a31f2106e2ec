"""Qwen3-Omni's vision tower, which computes what Qwen3-VL's does."""

from . import MODELS, VLM_STEP, Declaration, HubModels, Model, Seams

_OMNI = f"{MODELS}.qwen_omni"
THINKER = f"{_OMNI}.modeling_qwen3_omni.thinker_model"
TOWER = "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe"


def _seams(feature: str) -> Seams:
    from ..seam import Seam
    from ..tower_seams import layer_seams, tower_seams

    return (
        Seam(
            name="qwen3_omni_model",
            module=THINKER,
            target="Qwen3OmniThinkerModel.get_image_features",
            kind="function",
            touch="read",
            purpose="the tower is found as `visual`",
            features=(feature,),
            uses=("self.visual(",),
        ),
        Seam(
            name="qwen3_omni_result",
            module=THINKER,
            target="_normalize_visual_outputs",
            kind="function",
            touch="read",
            purpose="embeddings and deepstack features are all that the model reads of the tower's result",
            features=(feature,),
            uses=("'pooler_output'", "'deepstack_features'"),
        ),
        *tower_seams(
            "qwen3_omni_tower",
            TOWER,
            "Qwen3OmniMoeVisionEncoder",
            feature,
            ("pos_embed", "num_grid_per_side", "deepstack_visual_indexes", "deepstack_merger_list"),
            (
                *("self.pos_embed(", "self.deepstack_merger_list[", "cu_seqlens=cu_seqlens"),
                *("position_embeddings=position_embeddings", "deepstack_features=deepstack_feature_lists"),
            ),
        ),
        *layer_seams(
            "qwen3_omni",
            TOWER,
            "Qwen3OmniMoeVisionBlock",
            "Qwen3OmniMoeVisionAttention",
            feature,
            "self.qkv(",
        ),
        Seam(
            name="qwen3_omni_output",
            module=TOWER,
            target="BaseModelOutputWithDeepstackFeatures",
            kind="class",
            touch="called",
            purpose="what the tower's forward returns, made from a region's outputs",
            features=(feature,),
            attributes=("pooler_output", "deepstack_features"),
        ),
    )


MODEL = Model(
    module=f"{_OMNI}.qwen3_omni_provider",
    provider="Qwen3OmniModelProvider",
    hub=(HubModels(r"Qwen/Qwen3-Omni-\d+B-A\d+B", experts=128),),
    config_field="thinker_config",
    steps=(VLM_STEP, f"{_OMNI}.qwen3_omni_step"),
)
ENCODER = Declaration(name="Qwen3-Omni", model=MODEL, region="qwen3_omni:QWEN3_OMNI", seams=_seams)
