"""Seams of Bridge's vision-language models: providers, and Qwen3-VL's vision model."""

from ..encoders import MODELS, Model, models
from ..seam import Feature, Seam
from .training import RESTORED

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
        Seam(
            name=f"{provider}.init",
            module=module,
            target=f"{provider}.__init__",
            kind="function",
            touch="extended",
            purpose=OPTIONS,
            features=(Feature.OPTIONS,),
            models=(provider,),
            undo=RESTORED,
            patched_by="hooks.configuration.provider_fields",
        ),
        Seam(
            name=f"{provider}.fields",
            module=module,
            target=f"{provider}.__dataclass_fields__",
            kind="value",
            touch="extended",
            purpose=OPTIONS,
            features=(Feature.OPTIONS,),
            models=(provider,),
            undo=RESTORED,
            patched_by="hooks.configuration.provider_fields",
        ),
    )


def _provider(model: Model) -> tuple[Seam, ...]:
    return (
        *field_seams(model.module, model.provider),
        Seam(
            name=f"{model.provider}.config",
            module=model.module,
            target=model.provider,
            kind="class",
            touch="read",
            purpose="the vision encoder's configuration and what the check reads",
            features=(Feature.VISION,),
            models=(model.provider,),
            attributes=(model.config_field, "provide", "cuda_graph_warmup_steps", "use_te_rng_tracker"),
        ),
    )


def _stage(model: Model) -> Seam:
    return Seam(
        name=f"{model.provider}.provide",
        module=model.module,
        target=f"{model.provider}.provide",
        kind="function",
        touch="extended",
        purpose="an interleaved pipeline's model chunks know their virtual stage",
        features=(Feature.PIPELINES,),
        models=(model.provider,),
        undo=RESTORED,
        parameters=("pre_process", "post_process", "vp_stage"),
        uses=(f"{MODEL_OF_PROVIDER}(",),
        patched_by="parallel.virtual_stages",
    )


SEAMS = (
    *(entry for model in WITH_ENCODERS for entry in _provider(model)),
    *map(_stage, DROPS_STAGE),
    Seam(
        name="vlm_stage",
        module=MODEL,
        target="Qwen3VLModel",
        kind="class",
        touch="called",
        purpose="the model takes the virtual stage that it is of an interleaved pipeline",
        features=(Feature.PIPELINES,),
        models=tuple(model.provider for model in DROPS_STAGE),
        parameters=("vp_stage",),
    ),
    Seam(
        name="vision_config",
        module=VISION_CONFIG,
        target="get_vision_model_config",
        kind="function",
        touch="read",
        purpose="the vision encoder's configuration says that it is on graphs",
        features=(Feature.VISION_QWEN3_VL,),
        parameters=("hf_config", "megatron_config"),
        uses=("config.cuda_graph_impl = megatron_config.vision_cuda_graph_impl",),
    ),
    Seam(
        name="deepstack_forward",
        module=MODEL,
        target="Qwen3VLModel.forward",
        kind="function",
        touch="extended",
        purpose="under sequence parallelism the gradients of deepstack features are summed over the ranks",
        features=(Feature.DEEPSTACK_GRADIENTS,),
        undo=RESTORED,
        parameters=("self", "input_ids", "pixel_values"),
        uses=("deepstack_visual_embeds = deepstack_feature_lists", "tp_size=self.pg_collection.tp.size()"),
        patched_by="encoders.deepstack",
    ),
    Seam(
        name="deepstack_split",
        module=MODEL,
        target="split_deepstack_embs",
        kind="function",
        touch="replaced",
        purpose="a plain slice of the features, whose backward sums nothing; it gets features that do",
        features=(Feature.DEEPSTACK_GRADIENTS,),
        undo="put back when the model's forward returns",
        parameters=("visual_pos_masks", "deepstack_visual_embeds", "tp_size", "sequence_parallel"),
        uses=(
            "for deepstack_visual_embed in deepstack_visual_embeds:",
            "tmp_slice_tensor.append(deepstack_visual_embed[tp_slice])",
            "deepstack_visual_embeds_ret.append(torch.cat(tmp_slice_tensor, dim=0))",
        ),
    ),
    Seam(
        name="vision_padding",
        module=VISION_MODEL,
        target="Qwen3VLVisionModel.forward",
        kind="function",
        touch="extended",
        purpose="warm-up and eager steps keep attention inside each image",
        features=(Feature.VISION_QWEN3_VL,),
        undo=RESTORED,
        parameters=("self",),
        patched_by="encoders.qwen3_vl_patches",
    ),
    Seam(
        name="vision_padding_switch",
        module=VISION_MODEL,
        target="Qwen3VLVisionModel._uses_vision_cuda_graph",
        kind="function",
        touch="instance",
        purpose="says no while forward runs, so that upstream's own padding is not used",
        features=(Feature.VISION_QWEN3_VL,),
        undo="taken off when forward returns",
        parameters=("self",),
    ),
    Seam(
        name="vision_forward",
        module=VISION_MODEL,
        target="Qwen3VLVisionModel.forward",
        kind="function",
        touch="instance",
        purpose="a whole encoder's microbatch replays a graph",
        features=(Feature.VISION_QWEN3_VL,),
        undo="the end of training and deactivate() take the instance's own forward off",
        parameters=("hidden_states", "grid_thw", "inference_params", "extra_block_kwargs"),
    ),
    Seam(
        name="vision_parts",
        module=VISION_MODEL,
        target="Qwen3VLVisionModel",
        kind="class",
        touch="called",
        purpose="the parts that a recorded region runs in place of the encoder's forward",
        features=(Feature.VISION_QWEN3_VL,),
        attributes=("patch_embed", "pos_embed", "rotary_pos_emb", "decoder", "merger", "config"),
    ),
    Seam(
        name="vision_block",
        module=BLOCK,
        target="Qwen3VLVisionTransformerBlock.forward",
        kind="function",
        touch="called",
        purpose="the layers, with packed segments and rotary angles as arguments",
        features=(Feature.VISION_QWEN3_VL,),
        parameters=("hidden_states", "attention_mask", "inference_params", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        name="vision_block_parts",
        module=BLOCK,
        target="Qwen3VLVisionTransformerBlock",
        kind="class",
        touch="read",
        purpose="layers that become regions of their own; deepstack features are further outputs",
        features=(Feature.VISION_QWEN3_VL,),
        attributes=("layers", "deepstack_merger_list"),
    ),
    Seam(
        name="vision_merger",
        module=PARTS,
        target="Qwen3VLVisionPatchMerger.forward",
        kind="function",
        touch="instance",
        purpose="deepstack features are computed on a stream of their own while work is recorded",
        features=(Feature.STREAMS,),
        undo="put back when the recording ends",
        parameters=("self", "hidden_states"),
    ),
    Seam(
        name="patch_embedding",
        module=PARTS,
        target="Qwen3VLVisionPatchEmbed",
        kind="class",
        touch="read",
        purpose="pixels enter a graph in the type of its weight",
        features=(Feature.VISION_QWEN3_VL,),
        attributes=("proj",),
    ),
    Seam(
        name="rotary_frequencies",
        module=PARTS,
        target="Qwen3VLVisionRotaryEmbedding.forward",
        kind="function",
        touch="called",
        purpose="the first call makes the buffer inv_freq",
        features=(Feature.VISION_QWEN3_VL,),
        parameters=("seqlen",),
        uses=("register_buffer('inv_freq'",),
    ),
    Seam(
        name="vision_configuration",
        module=VISION_CONFIG,
        target="Qwen3VLTransformerConfig",
        kind="class",
        touch="read",
        purpose="patch, merge and head sizes, and how many layers give deepstack features",
        features=(Feature.VISION_QWEN3_VL, Feature.FULL_ITERATION),
        attributes=(
            *("spatial_merge_size", "temporal_patch_size", "patch_size", "in_channels", "num_position_embeddings"),
            *("hidden_size", "kv_channels", "deepstack_visual_indexes"),
        ),
    ),
    Seam(
        name="vlm_parts",
        module=MODEL,
        target="Qwen3VLModel",
        kind="class",
        touch="read",
        purpose="the vision model, the language model and the provider are found through the model that holds them",
        features=(Feature.VISION_QWEN3_VL, Feature.FULL_ITERATION),
        attributes=("vision_model", "language_model", "config"),
    ),
    Seam(
        name="vision_attention",
        module=ATTENTION,
        target="Qwen3VLSelfAttention.forward",
        kind="function",
        touch="instance",
        purpose="queries and keys are rotated where they are projected while work is recorded",
        features=(Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        parameters=("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
        uses=("get_query_key_value_tensors", "apply_rotary_pos_emb_absolute"),
    ),
    Seam(
        name="vision_projection",
        module="megatron.core.transformer.attention",
        target="SelfAttention.get_query_key_value_tensors",
        kind="function",
        touch="instance",
        purpose="the projection to queries, keys and values rotates them while work is recorded",
        features=(Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        parameters=("hidden_states", "key_value_states"),
        uses=("linear_qkv",),
    ),
    Seam(
        name="rotary_kernel",
        module=ATTENTION,
        target="apply_rotary_pos_emb_absolute",
        kind="function",
        touch="replaced",
        purpose="one kernel in its place while work is recorded",
        features=(Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL),
        undo="put back when the recording ends",
        parameters=("t", "freqs", "config", "cu_seqlens"),
    ),
)
