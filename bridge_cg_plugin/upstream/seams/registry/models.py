"""Seams of Bridge's vision-language models: providers, and Qwen3-VL's vision model."""

from ..encoders import MODELS, Model, models
from ..seam import Feature, Seam, called, patched, read, touched

QWEN_VL = f"{MODELS}.qwen_vl"
QWEN3_VL_MODELS = (
    Model(f"{QWEN_VL}.qwen3_vl_provider", "Qwen3VLModelProvider"),
    Model(f"{QWEN_VL}.qwen3_vl_provider", "Qwen3VLMoEModelProvider"),
    Model(f"{QWEN_VL}.qwen35_vl_provider", "Qwen35VLModelProvider"),
    Model(f"{QWEN_VL}.qwen35_vl_provider", "Qwen35VLMoEModelProvider"),
)
WITH_ENCODERS = (*QWEN3_VL_MODELS, *models())
PROVIDERS = tuple((model.module, model.provider) for model in WITH_ENCODERS)
QWEN3_VL = tuple(model.provider for model in QWEN3_VL_MODELS)
DROPS_STAGE = QWEN3_VL_MODELS[:2]  # do not tell their model which virtual pipeline stage it is
MODEL_OF_PROVIDER = "Qwen3VLModel"
MODELLING = f"{QWEN_VL}.modelling_qwen3_vl"
MODEL, VISION_MODEL = f"{MODELLING}.model", f"{MODELLING}.vision_model"
ATTENTION, BLOCK, PARTS = f"{MODELLING}.attention", f"{MODELLING}.transformer_block", f"{MODELLING}.utils"
VISION_CONFIG = f"{MODELLING}.transformer_config"
OPTIONS = "vision graph options can be set, overridden and saved with the model's configuration"


def field_seams(module: str, provider: str) -> tuple[Seam, Seam]:
    """Return the seams where a provider gets the options as fields: its constructor and its dataclass fields."""
    return (
        patched(
            f"{provider}.init",
            f"{module}:{provider}.__init__",
            OPTIONS,
            Feature.OPTIONS,
            "hooks.configuration.provider_fields",
            kind="function",
            models=(provider,),
        ),
        patched(
            f"{provider}.fields",
            f"{module}:{provider}.__dataclass_fields__",
            OPTIONS,
            Feature.OPTIONS,
            "hooks.configuration.provider_fields",
            kind="value",
            models=(provider,),
        ),
    )


def _provider(model: Model) -> tuple[Seam, ...]:
    return (
        *field_seams(model.module, model.provider),
        read(
            f"{model.provider}.config",
            f"{model.module}:{model.provider}",
            "the vision encoder's configuration and what the check reads",
            Feature.VISION,
            kind="class",
            attributes=(model.config_field, "provide", "cuda_graph_warmup_steps", "use_te_rng_tracker"),
            models=(model.provider,),
        ),
    )


def _stage(model: Model) -> Seam:
    return patched(
        f"{model.provider}.provide",
        f"{model.module}:{model.provider}.provide",
        "an interleaved pipeline's model chunks know their virtual stage",
        Feature.PIPELINES,
        "parallel.virtual_stages",
        kind="function",
        takes="pre_process post_process vp_stage",
        models=(model.provider,),
        uses=(f"{MODEL_OF_PROVIDER}(",),
    )


SEAMS = (
    *(entry for model in WITH_ENCODERS for entry in _provider(model)),
    *map(_stage, DROPS_STAGE),
    called(
        "vlm_stage",
        f"{MODEL}:Qwen3VLModel",
        "the model takes the virtual stage that it is of an interleaved pipeline",
        Feature.PIPELINES,
        takes="vp_stage",
        models=tuple(model.provider for model in DROPS_STAGE),
    ),
    read(
        "vision_config",
        f"{VISION_CONFIG}:get_vision_model_config",
        "the vision encoder's configuration says that it is on graphs",
        Feature.VISION_QWEN3_VL,
        takes="hf_config megatron_config",
        uses=("config.cuda_graph_impl = megatron_config.vision_cuda_graph_impl",),
    ),
    patched(
        "deepstack_forward",
        f"{MODEL}:Qwen3VLModel.forward",
        "under sequence parallelism the gradients of deepstack features are summed over the ranks",
        Feature.DEEPSTACK_GRADIENTS,
        "encoders.deepstack",
        takes="self input_ids pixel_values",
        uses=("deepstack_visual_embeds = deepstack_feature_lists", "tp_size=self.pg_collection.tp.size()"),
    ),
    touched(
        "replaced",
        "deepstack_split",
        f"{MODEL}:split_deepstack_embs",
        "a plain slice of the features, whose backward sums nothing; it gets features that do",
        Feature.DEEPSTACK_GRADIENTS,
        undo="put back when the model's forward returns",
        takes="visual_pos_masks deepstack_visual_embeds tp_size sequence_parallel",
        uses=(
            "for deepstack_visual_embed in deepstack_visual_embeds:",
            "tmp_slice_tensor.append(deepstack_visual_embed[tp_slice])",
            "deepstack_visual_embeds_ret.append(torch.cat(tmp_slice_tensor, dim=0))",
        ),
    ),
    patched(
        "vision_padding",
        f"{VISION_MODEL}:Qwen3VLVisionModel.forward",
        "warm-up and eager steps keep attention inside each image",
        Feature.VISION_QWEN3_VL,
        "encoders.qwen3_vl_patches",
        takes="self",
    ),
    touched(
        "instance",
        "vision_padding_switch",
        f"{VISION_MODEL}:Qwen3VLVisionModel._uses_vision_cuda_graph",
        "says no while forward runs, so that upstream's own padding is not used",
        Feature.VISION_QWEN3_VL,
        undo="taken off when forward returns",
        takes="self",
    ),
    touched(
        "instance",
        "vision_forward",
        f"{VISION_MODEL}:Qwen3VLVisionModel.forward",
        "a whole encoder's microbatch replays a graph",
        Feature.VISION_QWEN3_VL,
        undo="the end of training and deactivate() take the instance's own forward off",
        takes="hidden_states grid_thw inference_params extra_block_kwargs",
    ),
    called(
        "vision_parts",
        f"{VISION_MODEL}:Qwen3VLVisionModel",
        "the parts that a recorded region runs in place of the encoder's forward",
        Feature.VISION_QWEN3_VL,
        has="patch_embed pos_embed rotary_pos_emb decoder merger config",
    ),
    called(
        "vision_block",
        f"{BLOCK}:Qwen3VLVisionTransformerBlock.forward",
        "the layers, with packed segments and rotary angles as arguments",
        Feature.VISION_QWEN3_VL,
        takes="hidden_states attention_mask inference_params rotary_pos_emb packed_seq_params",
    ),
    read(
        "vision_block_parts",
        f"{BLOCK}:Qwen3VLVisionTransformerBlock",
        "layers that become regions of their own; deepstack features are further outputs",
        Feature.VISION_QWEN3_VL,
        has="layers deepstack_merger_list",
    ),
    touched(
        "instance",
        "vision_merger",
        f"{PARTS}:Qwen3VLVisionPatchMerger.forward",
        "deepstack features are computed on a stream of their own while work is recorded",
        Feature.VISION_QWEN3_VL,
        undo="put back when the recording ends",
        takes="self hidden_states",
    ),
    read(
        "patch_embedding",
        f"{PARTS}:Qwen3VLVisionPatchEmbed",
        "pixels enter a graph in the type of its weight",
        Feature.VISION_QWEN3_VL,
        has="proj",
    ),
    called(
        "rotary_frequencies",
        f"{PARTS}:Qwen3VLVisionRotaryEmbedding.forward",
        "the first call makes the buffer inv_freq",
        Feature.VISION_QWEN3_VL,
        takes="seqlen",
        uses=("register_buffer('inv_freq'",),
    ),
    read(
        "vision_configuration",
        f"{VISION_CONFIG}:Qwen3VLTransformerConfig",
        "patch, merge and head sizes, and how many layers give deepstack features",
        (Feature.VISION_QWEN3_VL, Feature.FULL_ITERATION),
        has="spatial_merge_size temporal_patch_size patch_size in_channels "
        "num_position_embeddings hidden_size kv_channels deepstack_visual_indexes",
    ),
    read(
        "vlm_parts",
        f"{MODEL}:Qwen3VLModel",
        "the vision model, the language model and the provider are found through the model that holds them",
        (Feature.VISION_QWEN3_VL, Feature.FULL_ITERATION),
        has="vision_model language_model config",
    ),
    touched(
        "instance",
        "vision_attention",
        f"{ATTENTION}:Qwen3VLSelfAttention.forward",
        "queries and keys are rotated where they are projected while work is recorded",
        (Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params",
        uses=("get_query_key_value_tensors", "apply_rotary_pos_emb_absolute"),
    ),
    touched(
        "instance",
        "vision_projection",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        "the projection to queries, keys and values rotates them while work is recorded",
        (Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        takes="hidden_states key_value_states",
        uses=("linear_qkv",),
    ),
    touched(
        "replaced",
        "rotary_kernel",
        f"{ATTENTION}:apply_rotary_pos_emb_absolute",
        "one kernel in its place while work is recorded",
        (Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        takes="t freqs config cu_seqlens",
    ),
)
