"""GLM-4.5V's vision tower."""

from . import MODELS, Declaration, HubModels, Model, Seams

_GLM_VL, _TOWER = f"{MODELS}.glm_vl", "transformers.models.glm4v.modeling_glm4v"


def _seams(feature: str) -> Seams:
    from ..seam import called, read
    from ..tower_seams import EMBEDDINGS_READ, layer_seams, tower_seams

    return (
        read(
            "glm45v_model",
            f"{_GLM_VL}.modeling_glm_45v:GLM45VModel.forward",
            EMBEDDINGS_READ,
            feature,
            uses=("self.get_image_features(", "self.get_video_features(", ".pooler_output"),
        ),
        *tower_seams(
            "glm45v_tower",
            _TOWER,
            "Glm4vVisionModel",
            feature,
            ("post_conv_layernorm", "embeddings", "post_layernorm", "downsample"),
            (
                *("self.post_conv_layernorm(", "self.embeddings(", "self.post_layernorm(", "self.downsample("),
                *("cu_seqlens=cu_seqlens", "position_embeddings=position_embeddings"),
            ),
        ),
        *layer_seams("glm45v", _TOWER, "Glm4vVisionBlock", "Glm4vVisionAttention", feature, "self.qkv("),
        called(
            "glm45v_positions",
            f"{_TOWER}:Glm4vVisionEmbeddings.forward",
            "position embeddings are sampled on the device, each frame's by its own row of sizes",
            feature,
            takes="embeddings lengths image_shapes h_coords w_coords",
            uses=("lengths.cumsum(0)", "image_shapes[seq_ids, 1]"),
        ),
        read(
            "glm45v_video",
            f"{_TOWER}:Glm4vModel.get_video_features",
            "the model gives the tower each frame of a video as an image of its own",
            feature,
            uses=("grid_thw=flattened_video_grid_thw",),
        ),
    )


ENCODER = Declaration(
    name="GLM-4.5V",
    model=Model(
        module=f"{_GLM_VL}.glm_45v_provider",
        provider="GLM45VModelProvider",
        hub=(HubModels(r"zai-org/GLM-4\.5V", experts=128),),
    ),
    region="glm45v:GLM45V",
    seams=_seams,
)
