"""Seams of models whose vision tower is Hugging Face's module: Qwen2.5-VL and Gemma 3."""

from ..seam import Feature, Seam

QWEN_VL = "megatron.bridge.models.qwen_vl"
GEMMA_VL = "megatron.bridge.models.gemma_vl"
# Module and class of a model's provider, and what asks for its tower on graphs.
TOWERS = (
    (f"{QWEN_VL}.qwen25_vl_provider", "Qwen25VLModelProvider", Feature.VISION_QWEN25_VL),
    (f"{GEMMA_VL}.gemma3_vl_provider", "Gemma3VLModelProvider", Feature.VISION_GEMMA3),
)
TOWER_PROVIDERS = tuple((module, provider) for module, provider, _ in TOWERS)
TOWER_FEATURES = tuple(feature for _, _, feature in TOWERS)
WINDOWED = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
SIGLIP = "transformers.models.siglip.modeling_siglip"

SEAMS = (
    Seam(
        name="qwen25_vl_model",
        module=f"{QWEN_VL}.modeling_qwen25_vl",
        target="Qwen25VLModel.forward",
        kind="function",
        touch="read",
        purpose="the tower is found as `visual`, and its merged embeddings are all that the model reads of its result",
        features=(Feature.VISION_QWEN25_VL,),
        uses=("self.get_image_features(", ".pooler_output"),
    ),
    Seam(
        name="gemma3_vl_model",
        module=f"{GEMMA_VL}.modeling_gemma3_vl",
        target="Gemma3VLModel.__init__",
        kind="function",
        touch="read",
        purpose="the tower is found as `vision_tower`",
        features=(Feature.VISION_GEMMA3,),
        uses=("self.vision_tower =",),
    ),
    Seam(
        name="windowed_tower_forward",
        module=WINDOWED,
        target="Qwen2_5_VisionTransformerPretrainedModel.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph, computed as here",
        features=(Feature.VISION_QWEN25_VL,),
        undo="the end of training and deactivate() take the instance's own forward off",
        parameters=("hidden_states", "grid_thw"),
        uses=(
            "self.patch_embed(",
            "self.rotary_pos_emb(",
            "self.fullatt_block_indexes",
            "cu_seqlens=cu_seqlens_now",
            "position_embeddings=position_embeddings",
            "self.merger(",
            "pooler_output=merged_hidden_states",
        ),
    ),
    Seam(
        name="windowed_tower_parts",
        module=WINDOWED,
        target="Qwen2_5_VisionTransformerPretrainedModel",
        kind="class",
        touch="called",
        purpose="the parts that a recorded region runs in place of the encoder's forward",
        features=(Feature.VISION_QWEN25_VL,),
        attributes=("patch_embed", "rotary_pos_emb", "blocks", "merger", "window_size", "patch_size"),
    ),
    Seam(
        name="windowed_block",
        module=WINDOWED,
        target="Qwen2_5_VLVisionBlock.forward",
        kind="function",
        touch="called",
        purpose="the layers, which hand `cu_seqlens` on to attention as they get it",
        features=(Feature.VISION_QWEN25_VL,),
        parameters=("hidden_states", "cu_seqlens", "position_embeddings"),
        uses=("cu_seqlens=cu_seqlens",),
    ),
    Seam(
        name="windowed_attention",
        module=WINDOWED,
        target="Qwen2_5_VLVisionAttention.forward",
        kind="function",
        touch="instance",
        purpose="attention takes windows as a tensor while work is recorded; upstream reads them on the host",
        features=(Feature.VISION_QWEN25_VL,),
        undo="put back when the recording ends",
        parameters=("hidden_states", "cu_seqlens", "position_embeddings"),
        uses=("self.qkv(", "apply_rotary_pos_emb_vision(", "scaling=self.scaling", "self.proj("),
    ),
    Seam(
        name="siglip_forward",
        module=SIGLIP,
        target="SiglipVisionModel.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph of this function",
        features=(Feature.VISION_GEMMA3,),
        undo="the end of training and deactivate() take the instance's own forward off",
        parameters=("pixel_values", "interpolate_pos_encoding"),
        uses=("last_hidden_state=last_hidden_state", "pooler_output=pooler_output"),
    ),
)
