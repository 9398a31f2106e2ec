"""Seams of the encoders that `seams.encoders` declares: Hugging Face's towers, and megatron-core's RADIO."""

from .. import encoders
from ..encoders import MODELS, QWEN_OMNI, QWEN_VL
from ..seam import Seam, called, read, replayed, seams_of, swapped
from .engine import CORE

HF = "transformers.models"
QWEN25_TOWER = f"{HF}.qwen2_5_vl.modeling_qwen2_5_vl"
QWEN25_OMNI_TOWER = f"{HF}.qwen2_5_omni.modeling_qwen2_5_omni"
GLM_TOWER = f"{HF}.glm4v.modeling_glm4v"
PIXTRAL = f"{HF}.pixtral.modeling_pixtral"
OMNI_TOWERS = f"{HF}.qwen3_omni_moe.modeling_qwen3_omni_moe"
THINKER = f"{QWEN_OMNI}.modeling_qwen3_omni.thinker_model"
RADIO = f"{CORE}.models.vision.radio:RADIOViTModel"

EMBEDDINGS_READ = "the tower is found as `visual`, and its merged embeddings are all that the model reads of its result"
SEGMENTS = "attention takes segments as a tensor while work is recorded; upstream reads them on the host"
LAYERS = "the layers, which hand `cu_seqlens` on to attention as they get it"
# Queries and keys of Qwen2.5's towers.
ROTARY = called(
    f"{QWEN25_TOWER}:apply_rotary_pos_emb_vision(q, k, cos, sin)",
    "queries and keys are rotated by cosines and sines",
    "q * cos + rotate_half(q) * sin",
)


def _forward(tower: str, *uses: str | tuple[str, ...]) -> Seam:
    """Return the row of a tower's forward, whose code names the parts that a region runs in its place.

    Args:
        tower: The forward with its parameters, as a row has it.
        uses: Code that it must contain.
    """
    return replayed(tower, "a whole encoder's microbatch replays a graph, computed as here", *uses)


def _tower(tower: str, *uses: str | tuple[str, ...]) -> Seam:
    """Return the row of the forward of a tower of images of any size; see `_forward`."""
    return _forward(
        f"{tower}.forward(hidden_states, grid_thw)",
        *("self.patch_embed(", "self.blocks", "self.merger(", "pooler_output=merged_hidden_states"),
        ("self.rotary_pos_emb(position_ids)", "self.rotary_pos_emb(hidden_states, position_ids)"),
        *uses,
    )


def _layers(name: str, classes: str, *uses: str) -> dict[str, Seam]:
    """Return the rows of such a tower's layers.

    Args:
        name: Of the tower, for the seams' names.
        classes: What the names of the classes of layers and attention begin with.
        uses: Code that attention must contain.
    """
    takes = "hidden_states cu_seqlens position_embeddings"
    return {
        f"{name}_block": called(f"{classes}Block.forward", LAYERS, "cu_seqlens=cu_seqlens", takes=takes),
        f"{name}_attention": swapped(
            f"{classes}Attention.forward",
            SEGMENTS,
            *(*uses, "apply_rotary_pos_emb_vision(", "scaling=self.scaling", "self.proj("),
            takes=takes,
        ),
    }


_GEMMA3_VL = seams_of(
    encoders.GEMMA3_VL.feature,
    gemma3_vl_model=read(
        f"{MODELS}.gemma_vl.modeling_gemma3_vl:Gemma3VLModel.__init__",
        "the tower is found as `vision_tower`",
        "self.vision_tower =",
    ),
    siglip_forward=replayed(
        f"{HF}.siglip.modeling_siglip:SiglipVisionModel.forward(pixel_values, interpolate_pos_encoding)",
        "a whole encoder's microbatch replays a graph of this function",
        "last_hidden_state=last_hidden_state",
        "pooler_output=pooler_output",
    ),
)
_GLM45V = seams_of(
    encoders.GLM45V.feature,
    glm45v_model=read(
        f"{MODELS}.glm_vl.modeling_glm_45v:GLM45VModel.forward",
        EMBEDDINGS_READ,
        *("self.get_image_features(", "self.get_video_features(", ".pooler_output"),
    ),
    glm45v_tower_forward=_tower(
        f"{GLM_TOWER}:Glm4vVisionModel",
        *("self.post_conv_layernorm(", "self.embeddings(", "self.post_layernorm(", "self.downsample("),
        *("cu_seqlens=cu_seqlens", "position_embeddings=position_embeddings"),
    ),
    **_layers("glm45v", f"{GLM_TOWER}:Glm4vVision", "self.qkv("),
    glm45v_positions=called(
        f"{GLM_TOWER}:Glm4vVisionEmbeddings.forward(embeddings, lengths, image_shapes, h_coords, w_coords)",
        "position embeddings are sampled on the device, each frame's by its own row of sizes",
        "lengths.cumsum(0)",
        "image_shapes[seq_ids, 1]",
    ),
    glm45v_video=read(
        f"{GLM_TOWER}:Glm4vModel.get_video_features",
        "the model gives the tower each frame of a video as an image of its own",
        "grid_thw=flattened_video_grid_thw",
    ),
)
_MINISTRAL3 = seams_of(
    encoders.MINISTRAL3.feature,
    ministral3_model=read(
        f"{MODELS}.ministral3.modeling_ministral3:Ministral3Model.__init__",
        "the tower is found as `vision_tower`",
        *("self.vision_tower =", "self.get_image_features ="),
    ),
    ministral3_features=read(
        f"{HF}.mistral3.modeling_mistral3:Mistral3Model.get_image_features",
        "the tower is asked for all hidden states, of which the last are read",
        *("image_sizes=image_sizes", "image_outputs.hidden_states[vision_feature_layer]"),
        # Before transformers 5.18, before 5.23, and from then on, where it asks for those of one layer.
        ("output_hidden_states=True", "kwargs['output_hidden_states'] = True", "select_hidden_states("),
    ),
    pixtral_forward=_forward(
        f"{PIXTRAL}:PixtralVisionModel.forward(pixel_values, image_sizes)",
        *("self.patch_conv(", "size[0] // self.patch_size", "self.ln_pre(", "self.transformer("),
        ("position_ids_in_meshgrid(", "torch.stack([hpos_ids.flatten(), wpos_ids.flatten()], dim=-1)"),
        "self.patch_positional_embedding(patch_embeds, position_ids)",
        *("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
    ),
    pixtral_places=read(
        f"{PIXTRAL}:PixtralVisionRotaryEmbedding.forward",
        "a patch's angles follow from its row and column, in a table or as they are",
        ("h_grid * max_width + v_grid", "position_ids[..., None].float()"),
        formerly=("position_ids_in_meshgrid",),
    ),
    pixtral_layer=called(
        f"{PIXTRAL}:PixtralAttentionLayer.forward(hidden_states, attention_mask, position_embeddings)",
        "the layers, which hand `attention_mask` on to attention as they get it",
        *("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
    ),
    pixtral_attention=swapped(
        f"{PIXTRAL}:PixtralAttention.forward(hidden_states, attention_mask, position_embeddings)",
        "attention takes segments as a tensor while work is recorded; upstream makes a mask on the host",
        *("self.q_proj(", "self.k_proj(", "self.v_proj(", "apply_rotary_pos_emb(", "scaling=self.scaling"),
        "self.o_proj(",
    ),
    hidden_state_hooks=read(
        "transformers.utils.output_capturing:install_output_capuring_hook",
        "the hooks that it leaves on layers collect outputs only in calls that ask for them",
        *("_active_collector.get()", "module.register_forward_hook(output_capturing_hook)"),
        formerly=("install_output_capturing_hook",),
    ),
)
_RADIO = seams_of(
    (encoders.NEMOTRON_OMNI.feature, encoders.NEMOTRON_VL.feature),
    radio_llava=read(
        f"{CORE}.models.multimodal.llava_model:LLaVAModel.__init__",
        "the tower is found as `vision_model`",
        "self.vision_model = RADIOViTModel(",
    ),
    radio_tower=read(
        f"{RADIO}.forward",
        "the layers get hidden states with class tokens and positions in them",
        "self.decoder(x, attention_mask=attention_mask, packed_seq_params=packed_seq_params)",
    ),
    radio_tower_parts=read(f"{RADIO}[decoder, seq_length]", "the layers, and the tokens of an image"),
    radio_layers=replayed(
        f"{CORE}.transformer.transformer_block:TransformerBlock.forward",
        "all layers of a microbatch replay a graph of this function",
        takes="hidden_states attention_mask packed_seq_params",
    ),
)
_NEMOTRON_VL = seams_of(
    encoders.NEMOTRON_VL.feature,
    nemotron_vl_model=read(
        f"{MODELS}.nemotron_vl.modeling_nemotron_vl:NemotronVLModel.__init__",
        "the model that holds the tower is found as `llava_model`",
        "self.llava_model = llava_model",
    ),
)
# Alike in both towers whose layers attend inside windows.
_WINDOWS = ("self.window_size", "self.fullatt_block_indexes", "cu_seqlens=cu_seqlens_now")
_QWEN25_OMNI = seams_of(
    encoders.QWEN25_OMNI.feature,
    qwen25_omni_model=read(
        f"{QWEN_OMNI}.modeling_qwen25_omni.thinker_model:Qwen25OmniThinkerModel.forward",
        EMBEDDINGS_READ,
        *("self.visual(pixel_values, grid_thw=image_grid_thw)", ".pooler_output"),
    ),
    windowed_omni_tower_forward=_tower(
        f"{QWEN25_OMNI_TOWER}:Qwen2_5OmniVisionEncoder",
        *(*_WINDOWS, ("position_embeddings=rotary_pos_emb", "position_embeddings=position_embeddings")),
    ),
    **_layers("windowed_omni", f"{QWEN25_OMNI_TOWER}:Qwen2_5OmniVision", *("self.q(", "self.k(", "self.v(")),
    windowed_omni_rotary=read(
        f"{QWEN25_OMNI_TOWER}:apply_rotary_pos_emb_vision",
        "a region takes cosines and sines once for all layers, and multiplies by them as here",
        ("tensor * cos + rotate_half(tensor) * sin", "q * cos + rotate_half(q) * sin"),
    ),
    windowed_omni_queries=ROTARY,
)
_QWEN25_VL = seams_of(
    encoders.QWEN25_VL.feature,
    qwen25_vl_model=read(
        f"{QWEN_VL}.modeling_qwen25_vl:Qwen25VLModel.forward",
        EMBEDDINGS_READ,
        *("self.get_image_features(", ".pooler_output"),
    ),
    windowed_tower_forward=_tower(
        f"{QWEN25_TOWER}:Qwen2_5_VisionTransformerPretrainedModel",
        *(*_WINDOWS, "position_embeddings=position_embeddings"),
    ),
    **_layers("windowed", f"{QWEN25_TOWER}:Qwen2_5_VLVision", "self.qkv("),
    windowed_rotary=ROTARY,
)
_QWEN3_OMNI = seams_of(
    encoders.QWEN3_OMNI.feature,
    qwen3_omni_model=read(
        f"{THINKER}:Qwen3OmniThinkerModel.get_image_features", "the tower is found as `visual`", "self.visual("
    ),
    qwen3_omni_result=read(
        f"{THINKER}:_normalize_visual_outputs",
        "embeddings and deepstack features are all that the model reads of the tower's result",
        *("'pooler_output'", "'deepstack_features'"),
    ),
    qwen3_omni_tower_forward=_tower(
        f"{OMNI_TOWERS}:Qwen3OmniMoeVisionEncoder",
        *("self.pos_embed(", "self.num_grid_per_side", "self.deepstack_visual_indexes", "self.deepstack_merger_list["),
        "cu_seqlens=cu_seqlens",
        *("position_embeddings=position_embeddings", "deepstack_features=deepstack_feature_lists"),
    ),
    **_layers("qwen3_omni", f"{OMNI_TOWERS}:Qwen3OmniMoeVision", "self.qkv("),
    qwen3_omni_output=called(
        f"{OMNI_TOWERS}:BaseModelOutputWithDeepstackFeatures[pooler_output, deepstack_features]",
        "what the tower's forward returns, made from a region's outputs",
    ),
)
_QWEN3_OMNI_AUDIO = seams_of(
    encoders.QWEN3_OMNI_AUDIO.feature,
    qwen3_omni_audio_model=read(
        f"{THINKER}:Qwen3OmniThinkerModel.get_audio_features",
        "the tower is found as `audio_model`, and its last hidden states are all that the model reads",
        *("self.audio_model(", "feature_lens=audio_feature_lengths", "audio_outputs.last_hidden_state"),
    ),
    qwen3_omni_audio_forward=_forward(
        f"{OMNI_TOWERS}:Qwen3OmniMoeAudioEncoder.forward(input_features, feature_lens)",
        *("chunk_and_pad_features(", "get_valid_indices(", "get_audio_cu_seqlens(", "self.conv_chunksize"),
        *("F.gelu(self.conv2d1(", "F.gelu(self.conv2d2(", "F.gelu(self.conv2d3(", "self.conv_out("),
        *("self.positional_embedding.positional_embedding[", "self.ln_post(", "self.proj1(", "self.act("),
        *("self.proj2(", "last_hidden_state=hidden_states"),
    ),
    qwen3_omni_audio_chunks=read(
        f"{OMNI_TOWERS}:chunk_and_pad_features",
        "a clip is cut into full chunks and one for the rest",
        *("torch.ceil(feature_lens / (n_window * 2))", "feature_lens % (n_window * 2)"),
    ),
    qwen3_omni_audio_windows=read(
        f"{OMNI_TOWERS}:get_audio_cu_seqlens",
        "windows are so many full chunks of a clip and one for the rest",
        *("n_window_infer // (n_window * 2)", "max_len_after_cnn * n_window_ratio"),
        *("cnn_len // window_aftercnn", "cnn_len % window_aftercnn"),
    ),
    qwen3_omni_audio_lengths=read(
        f"{OMNI_TOWERS}:_get_feat_extract_output_lengths",
        "tokens are counted by chunks of 100 frames, or of the encoder's",
        ("input_lengths % 100", "input_lengths % chunk_len"),
        ("input_lengths // 100 * 13", "input_lengths // chunk_len * 13"),
    ),
    qwen3_omni_audio_layer=called(
        f"{OMNI_TOWERS}:Qwen3OmniMoeAudioEncoderLayer.forward(hidden_states, cu_seqlens)",
        LAYERS,
        *("cu_seqlens=cu_seqlens", "outputs = (hidden_states,)"),
    ),
    qwen3_omni_audio_attention=swapped(
        f"{OMNI_TOWERS}:Qwen3OmniMoeAudioAttention.forward(hidden_states, cu_seqlens)",
        SEGMENTS,
        *("self.q_proj(", "self.k_proj(", "self.v_proj(", "scaling=self.scaling", "self.out_proj("),
    ),
)
SEAMS = (
    *(*_GEMMA3_VL, *_GLM45V, *_MINISTRAL3, *_RADIO, *_NEMOTRON_VL, *_QWEN25_OMNI, *_QWEN25_VL, *_QWEN3_OMNI),
    *_QWEN3_OMNI_AUDIO,
)
