"""Qwen3-Omni's vision tower, which computes what Qwen3-VL's does."""

from . import MODELS, VLM_STEP, Declaration, HubModels, Model, Seams

_OMNI = f"{MODELS}.qwen_omni"
THINKER = f"{_OMNI}.modeling_qwen3_omni.thinker_model"
TOWER = "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe"


def _seams(feature: str) -> Seams:
    from ..seam import called, read
    from ..tower_seams import layer_seams, tower_seams

    return (
        read(
            "qwen3_omni_model",
            f"{THINKER}:Qwen3OmniThinkerModel.get_image_features",
            "the tower is found as `visual`",
            feature,
            uses=("self.visual(",),
        ),
        read(
            "qwen3_omni_result",
            f"{THINKER}:_normalize_visual_outputs",
            "embeddings and deepstack features are all that the model reads of the tower's result",
            feature,
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
        called(
            "qwen3_omni_output",
            f"{TOWER}:BaseModelOutputWithDeepstackFeatures",
            "what the tower's forward returns, made from a region's outputs",
            feature,
            has="pooler_output deepstack_features",
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
