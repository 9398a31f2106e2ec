"""Seams of models whose vision tower is Hugging Face's module: all but Qwen3-VL and Qwen3.5-VL."""

from ..seam import Feature, Seam

MODELS = "megatron.bridge.models"
QWEN_VL = f"{MODELS}.qwen_vl"
GEMMA_VL = f"{MODELS}.gemma_vl"
OMNI = f"{MODELS}.qwen_omni"
THINKER = f"{OMNI}.modeling_qwen3_omni.thinker_model"
# Module and class of a model's provider, and what asks for its tower on graphs.
TOWERS = (
    (f"{QWEN_VL}.qwen25_vl_provider", "Qwen25VLModelProvider", Feature.VISION_QWEN25_VL),
    (f"{GEMMA_VL}.gemma3_vl_provider", "Gemma3VLModelProvider", Feature.VISION_GEMMA3),
    (f"{MODELS}.glm_vl.glm_45v_provider", "GLM45VModelProvider", Feature.VISION_GLM45V),
    (f"{OMNI}.qwen25_omni_provider", "Qwen25OmniModelProvider", Feature.VISION_QWEN25_OMNI),
    (f"{OMNI}.qwen3_omni_provider", "Qwen3OmniModelProvider", Feature.VISION_QWEN3_OMNI),
    (f"{MODELS}.ministral3.ministral3_provider", "Ministral3ModelProvider", Feature.VISION_MINISTRAL3),
)
TOWER_PROVIDERS = tuple((module, provider) for module, provider, _ in TOWERS)
TOWER_FEATURES = tuple(feature for _, _, feature in TOWERS)
# Providers that hold the tower's configuration in another field than `vision_config`.
CONFIG_FIELDS = {
    "Qwen25OmniModelProvider": "thinker_config",
    "Qwen3OmniModelProvider": "thinker_config",
    "Ministral3ModelProvider": "hf_config",
}
# Providers that came with a later release than the oldest.
QWEN3_OMNI_SINCE = "0.5.1"
SINCE = {"Qwen3OmniModelProvider": QWEN3_OMNI_SINCE}
WINDOWED = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
SIGLIP = "transformers.models.siglip.modeling_siglip"
GLM4V = "transformers.models.glm4v.modeling_glm4v"
WINDOWED_OMNI = "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni"
QWEN3_OMNI = "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe"
PIXTRAL = "transformers.models.pixtral.modeling_pixtral"
FORWARD_OFF = "the end of training and deactivate() take the instance's own forward off"
BLOCK_CALL = ("hidden_states", "cu_seqlens", "position_embeddings")


def _layers(name: str, module: str, block: str, attention: str, feature: Feature, *uses: str) -> tuple[Seam, Seam]:
    """Return the seams of a tower's layers, of images of any size.

    Args:
        name: Of the tower, for the seams' names.
        module: Upstream's module.
        block: The class of layers.
        attention: The class of their attention.
        feature: What does not work without them.
        uses: Code that attention must contain.
    """
    return (
        Seam(
            name=f"{name}_block",
            module=module,
            target=f"{block}.forward",
            kind="function",
            touch="called",
            purpose="the layers, which hand `cu_seqlens` on to attention as they get it",
            features=(feature,),
            parameters=BLOCK_CALL,
            uses=("cu_seqlens=cu_seqlens",),
        ),
        Seam(
            name=f"{name}_attention",
            module=module,
            target=f"{attention}.forward",
            kind="function",
            touch="instance",
            purpose="attention takes segments as a tensor while work is recorded; upstream reads them on the host",
            features=(feature,),
            undo="put back when the recording ends",
            parameters=BLOCK_CALL,
            uses=(*uses, "apply_rotary_pos_emb_vision(", "scaling=self.scaling", "self.proj("),
        ),
    )


def _tower(
    name: str, module: str, tower: str, feature: Feature, attributes: tuple[str, ...], uses: tuple[str, ...]
) -> tuple[Seam, Seam]:
    """Return the seams of a tower of images of any size: its forward, and the parts that a region runs in its place."""
    return (
        Seam(
            name=f"{name}_forward",
            module=module,
            target=f"{tower}.forward",
            kind="function",
            touch="instance",
            purpose="a whole encoder's microbatch replays a graph, computed as here",
            features=(feature,),
            undo=FORWARD_OFF,
            parameters=("hidden_states", "grid_thw"),
            uses=(
                *("self.patch_embed(", "self.rotary_pos_emb(", "self.merger(", "pooler_output=merged_hidden_states"),
                *uses,
            ),
        ),
        Seam(
            name=f"{name}_parts",
            module=module,
            target=tower,
            kind="class",
            touch="called",
            purpose="the parts that a recorded region runs in place of the encoder's forward",
            features=(feature,),
            attributes=("patch_embed", "rotary_pos_emb", "blocks", "merger", *attributes),
        ),
    )


WINDOWS = ("self.fullatt_block_indexes", "cu_seqlens=cu_seqlens_now")
WINDOW_PARTS = ("window_size", "patch_size")

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
    *_tower(
        "windowed_tower",
        WINDOWED,
        "Qwen2_5_VisionTransformerPretrainedModel",
        Feature.VISION_QWEN25_VL,
        WINDOW_PARTS,
        (*WINDOWS, "position_embeddings=position_embeddings"),
    ),
    *_layers(
        "windowed",
        WINDOWED,
        "Qwen2_5_VLVisionBlock",
        "Qwen2_5_VLVisionAttention",
        Feature.VISION_QWEN25_VL,
        "self.qkv(",
    ),
    Seam(
        name="siglip_forward",
        module=SIGLIP,
        target="SiglipVisionModel.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph of this function",
        features=(Feature.VISION_GEMMA3,),
        undo=FORWARD_OFF,
        parameters=("pixel_values", "interpolate_pos_encoding"),
        uses=("last_hidden_state=last_hidden_state", "pooler_output=pooler_output"),
    ),
    Seam(
        name="glm45v_model",
        module=f"{MODELS}.glm_vl.modeling_glm_45v",
        target="GLM45VModel.forward",
        kind="function",
        touch="read",
        purpose="the tower is found as `visual`, and its merged embeddings are all that the model reads of its result",
        features=(Feature.VISION_GLM45V,),
        uses=("self.get_image_features(", "self.get_video_features(", ".pooler_output"),
    ),
    *_tower(
        "glm45v_tower",
        GLM4V,
        "Glm4vVisionModel",
        Feature.VISION_GLM45V,
        ("post_conv_layernorm", "embeddings", "post_layernorm", "downsample"),
        (
            *("self.post_conv_layernorm(", "self.embeddings(", "self.post_layernorm(", "self.downsample("),
            *("cu_seqlens=cu_seqlens", "position_embeddings=position_embeddings"),
        ),
    ),
    *_layers("glm45v", GLM4V, "Glm4vVisionBlock", "Glm4vVisionAttention", Feature.VISION_GLM45V, "self.qkv("),
    Seam(
        name="glm45v_positions",
        module=GLM4V,
        target="Glm4vVisionEmbeddings.forward",
        kind="function",
        touch="called",
        purpose="position embeddings are sampled on the device, each frame's by its own row of sizes",
        features=(Feature.VISION_GLM45V,),
        parameters=("embeddings", "lengths", "image_shapes", "h_coords", "w_coords"),
        uses=("lengths.cumsum(0)", "image_shapes[seq_ids, 1]"),
    ),
    Seam(
        name="glm45v_video",
        module=GLM4V,
        target="Glm4vModel.get_video_features",
        kind="function",
        touch="read",
        purpose="the model gives the tower each frame of a video as an image of its own",
        features=(Feature.VISION_GLM45V,),
        uses=("grid_thw=flattened_video_grid_thw",),
    ),
    Seam(
        name="qwen25_omni_model",
        module=f"{OMNI}.modeling_qwen25_omni.thinker_model",
        target="Qwen25OmniThinkerModel.forward",
        kind="function",
        touch="read",
        purpose="the tower is found as `visual`, and its merged embeddings are all that the model reads of its result",
        features=(Feature.VISION_QWEN25_OMNI,),
        uses=("self.visual(pixel_values, grid_thw=image_grid_thw)", ".pooler_output"),
    ),
    *_tower(
        "windowed_omni_tower",
        WINDOWED_OMNI,
        "Qwen2_5OmniVisionEncoder",
        Feature.VISION_QWEN25_OMNI,
        WINDOW_PARTS,
        (*WINDOWS, "position_embeddings=rotary_pos_emb"),
    ),
    *_layers(
        "windowed_omni",
        WINDOWED_OMNI,
        "Qwen2_5OmniVisionBlock",
        "Qwen2_5OmniVisionAttention",
        Feature.VISION_QWEN25_OMNI,
        *("self.q(", "self.k(", "self.v("),
    ),
    Seam(
        name="windowed_omni_rotary",
        module=WINDOWED_OMNI,
        target="apply_rotary_pos_emb_vision",
        kind="function",
        touch="read",
        purpose="a region takes cosines and sines once for all layers, and multiplies by them as here",
        features=(Feature.VISION_QWEN25_OMNI,),
        parameters=("tensor", "freqs"),
        uses=("tensor * cos + rotate_half(tensor) * sin",),
    ),
    Seam(
        name="windowed_rotary",
        module=WINDOWED,
        target="apply_rotary_pos_emb_vision",
        kind="function",
        touch="called",
        purpose="queries and keys are rotated by cosines and sines",
        features=(Feature.VISION_QWEN25_VL, Feature.VISION_QWEN25_OMNI),
        parameters=("q", "k", "cos", "sin"),
        uses=("q * cos + rotate_half(q) * sin",),
    ),
    Seam(
        name="qwen3_omni_model",
        module=THINKER,
        target="Qwen3OmniThinkerModel.get_image_features",
        kind="function",
        touch="read",
        purpose="the tower is found as `visual`",
        features=(Feature.VISION_QWEN3_OMNI,),
        uses=("self.visual(",),
        since=QWEN3_OMNI_SINCE,
    ),
    Seam(
        name="qwen3_omni_result",
        module=THINKER,
        target="_normalize_visual_outputs",
        kind="function",
        touch="read",
        purpose="embeddings and deepstack features are all that the model reads of the tower's result",
        features=(Feature.VISION_QWEN3_OMNI,),
        uses=("'pooler_output'", "'deepstack_features'"),
        since=QWEN3_OMNI_SINCE,
    ),
    *_tower(
        "qwen3_omni_tower",
        QWEN3_OMNI,
        "Qwen3OmniMoeVisionEncoder",
        Feature.VISION_QWEN3_OMNI,
        ("pos_embed", "num_grid_per_side", "deepstack_visual_indexes", "deepstack_merger_list"),
        (
            *("self.pos_embed(", "self.deepstack_merger_list[", "cu_seqlens=cu_seqlens"),
            *("position_embeddings=position_embeddings", "deepstack_features=deepstack_feature_lists"),
        ),
    ),
    *_layers(
        "qwen3_omni",
        QWEN3_OMNI,
        "Qwen3OmniMoeVisionBlock",
        "Qwen3OmniMoeVisionAttention",
        Feature.VISION_QWEN3_OMNI,
        "self.qkv(",
    ),
    Seam(
        name="qwen3_omni_output",
        module=QWEN3_OMNI,
        target="BaseModelOutputWithDeepstackFeatures",
        kind="class",
        touch="called",
        purpose="what the tower's forward returns, made from a region's outputs",
        features=(Feature.VISION_QWEN3_OMNI,),
        attributes=("pooler_output", "deepstack_features"),
    ),
    Seam(
        name="qwen3_omni_audio_model",
        module=THINKER,
        target="Qwen3OmniThinkerModel.get_audio_features",
        kind="function",
        touch="read",
        purpose="the tower is found as `audio_model`, and its last hidden states are all that the model reads",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        uses=("self.audio_model(", "feature_lens=audio_feature_lengths", "audio_outputs.last_hidden_state"),
        since=QWEN3_OMNI_SINCE,
    ),
    Seam(
        name="qwen3_omni_audio_forward",
        module=QWEN3_OMNI,
        target="Qwen3OmniMoeAudioEncoder.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph, computed as here",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        undo=FORWARD_OFF,
        parameters=("input_features", "feature_lens"),
        uses=(
            *("chunk_and_pad_features(", "get_valid_indices(", "get_audio_cu_seqlens(", "self.conv_chunksize"),
            *("F.gelu(self.conv2d1(", "F.gelu(self.conv2d2(", "F.gelu(self.conv2d3(", "self.conv_out("),
            *("self.positional_embedding.positional_embedding[", "self.ln_post(", "self.proj1(", "self.act("),
            *("self.proj2(", "last_hidden_state=hidden_states"),
        ),
    ),
    Seam(
        name="qwen3_omni_audio_parts",
        module=QWEN3_OMNI,
        target="Qwen3OmniMoeAudioEncoder",
        kind="class",
        touch="called",
        purpose="the parts that a recorded region runs in place of the encoder's forward",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        attributes=(
            *("num_mel_bins", "n_window", "n_window_infer", "conv_chunksize", "positional_embedding", "layers"),
            *("conv2d1", "conv2d2", "conv2d3", "conv_out", "ln_post", "proj1", "act", "proj2"),
        ),
    ),
    Seam(
        name="qwen3_omni_audio_chunks",
        module=QWEN3_OMNI,
        target="chunk_and_pad_features",
        kind="function",
        touch="read",
        purpose="a clip is cut into full chunks and one for the rest",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        uses=("torch.ceil(feature_lens / (n_window * 2))", "feature_lens % (n_window * 2)"),
    ),
    Seam(
        name="qwen3_omni_audio_windows",
        module=QWEN3_OMNI,
        target="get_audio_cu_seqlens",
        kind="function",
        touch="read",
        purpose="windows are so many full chunks of a clip and one for the rest",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        uses=(
            *("n_window_infer // (n_window * 2)", "max_len_after_cnn * n_window_ratio"),
            *("cnn_len // window_aftercnn", "cnn_len % window_aftercnn"),
        ),
    ),
    Seam(
        name="qwen3_omni_audio_lengths",
        module=QWEN3_OMNI,
        target="_get_feat_extract_output_lengths",
        kind="function",
        touch="read",
        purpose="tokens are counted by chunks of 100 frames",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        uses=("input_lengths % 100", "input_lengths // 100 * 13"),
    ),
    Seam(
        name="qwen3_omni_audio_layer",
        module=QWEN3_OMNI,
        target="Qwen3OmniMoeAudioEncoderLayer.forward",
        kind="function",
        touch="called",
        purpose="the layers, which hand `cu_seqlens` on to attention as they get it",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        parameters=("hidden_states", "cu_seqlens"),
        uses=("cu_seqlens=cu_seqlens", "outputs = (hidden_states,)"),
    ),
    Seam(
        name="qwen3_omni_audio_attention",
        module=QWEN3_OMNI,
        target="Qwen3OmniMoeAudioAttention.forward",
        kind="function",
        touch="instance",
        purpose="attention takes segments as a tensor while work is recorded; upstream reads them on the host",
        features=(Feature.AUDIO_QWEN3_OMNI,),
        undo="put back when the recording ends",
        parameters=("hidden_states", "cu_seqlens"),
        uses=("self.q_proj(", "self.k_proj(", "self.v_proj(", "scaling=self.scaling", "self.out_proj("),
    ),
    Seam(
        name="ministral3_model",
        module=f"{MODELS}.ministral3.modeling_ministral3",
        target="Ministral3Model.__init__",
        kind="function",
        touch="read",
        purpose="the tower is found as `vision_tower`",
        features=(Feature.VISION_MINISTRAL3,),
        uses=("self.vision_tower =", "self.get_image_features ="),
    ),
    Seam(
        name="ministral3_features",
        module="transformers.models.mistral3.modeling_mistral3",
        target="Mistral3Model.get_image_features",
        kind="function",
        touch="read",
        purpose="the tower is asked for all hidden states, of which the last are read",
        features=(Feature.VISION_MINISTRAL3,),
        uses=(
            "image_sizes=image_sizes",
            "output_hidden_states=True",
            "image_outputs.hidden_states[vision_feature_layer]",
        ),
    ),
    Seam(
        name="pixtral_forward",
        module=PIXTRAL,
        target="PixtralVisionModel.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph, computed as here",
        features=(Feature.VISION_MINISTRAL3,),
        undo=FORWARD_OFF,
        parameters=("pixel_values", "image_sizes"),
        uses=(
            *("self.patch_conv(", "size[0] // self.patch_size", "self.ln_pre(", "position_ids_in_meshgrid("),
            *("self.patch_positional_embedding(patch_embeds, position_ids)", "self.transformer("),
            *("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
        ),
    ),
    Seam(
        name="pixtral_parts",
        module=PIXTRAL,
        target="PixtralVisionModel",
        kind="class",
        touch="called",
        purpose="the parts that a recorded region runs in place of the encoder's forward",
        features=(Feature.VISION_MINISTRAL3,),
        attributes=("patch_conv", "ln_pre", "transformer", "patch_positional_embedding"),
    ),
    Seam(
        name="pixtral_places",
        module=PIXTRAL,
        target="position_ids_in_meshgrid",
        kind="function",
        touch="read",
        purpose="a patch's place in the table of frequencies follows from its row and column",
        features=(Feature.VISION_MINISTRAL3,),
        parameters=("patch_embeds_list", "max_width"),
        uses=("h_grid * max_width + v_grid",),
    ),
    Seam(
        name="pixtral_layer",
        module=PIXTRAL,
        target="PixtralAttentionLayer.forward",
        kind="function",
        touch="called",
        purpose="the layers, which hand `attention_mask` on to attention as they get it",
        features=(Feature.VISION_MINISTRAL3,),
        parameters=("hidden_states", "attention_mask", "position_embeddings"),
        uses=("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
    ),
    Seam(
        name="pixtral_attention",
        module=PIXTRAL,
        target="PixtralAttention.forward",
        kind="function",
        touch="instance",
        purpose="attention takes segments as a tensor while work is recorded; upstream makes a mask on the host",
        features=(Feature.VISION_MINISTRAL3,),
        undo="put back when the recording ends",
        parameters=("hidden_states", "attention_mask", "position_embeddings"),
        uses=(
            *("self.q_proj(", "self.k_proj(", "self.v_proj(", "apply_rotary_pos_emb(", "scaling=self.scaling"),
            "self.o_proj(",
        ),
    ),
    Seam(
        name="hidden_state_hooks",
        module="transformers.utils.output_capturing",
        target="install_output_capuring_hook",
        formerly=("install_output_capturing_hook",),
        kind="function",
        touch="read",
        purpose="the hooks that it leaves on layers collect outputs only in calls that ask for them",
        features=(Feature.VISION_MINISTRAL3,),
        uses=("_active_collector.get()", "module.register_forward_hook(output_capturing_hook)"),
    ),
)
