"""Seams of Bridge's model providers, and of Qwen3-VL's model and vision encoder."""

from ..encoders import DECLARED_MODELS, MODELS, QWEN3_VL_MODELS, QWEN_VL, Model
from ..releases import OLDEST
from ..seam import Feature as F
from ..seam import Seam, called, patched, read, replayed, seams_of, swapped

WITH_ENCODERS = (*QWEN3_VL_MODELS, *DECLARED_MODELS)
PROVIDERS = tuple((model.module, model.provider) for model in WITH_ENCODERS)
# (module, class, first release that has it)
LANGUAGE_MODELS = (
    (f"{MODELS}.gpt_provider", "GPTModelProvider", OLDEST.bridge),
    (f"{MODELS}.hybrid.hybrid_provider", "HybridModelProvider", "0.6.2"),
    (f"{MODELS}.mamba.mamba_provider", "MambaModelProvider", OLDEST.bridge),
)
DROPS_STAGE = QWEN3_VL_MODELS[:2]  # do not tell their model which virtual pipeline stage it is
MODEL_OF_PROVIDER = "Qwen3VLModel"
MODELLING = f"{QWEN_VL}.modelling_qwen3_vl"
MODEL, VISION_MODEL = f"{MODELLING}.model", f"{MODELLING}.vision_model:Qwen3VLVisionModel"
ATTENTION, BLOCK, PARTS = f"{MODELLING}.attention", f"{MODELLING}.transformer_block", f"{MODELLING}.utils"
VISION_BLOCK = f"{BLOCK}:Qwen3VLVisionTransformerBlock"
VISION_CONFIG = f"{MODELLING}.transformer_config"


def field_seams(
    module: str, provider: str, since: str = OLDEST.bridge, options: str = "vision graph options"
) -> tuple[Seam, Seam]:
    """Return the seams where a provider gets the options as fields: its constructor and its dataclass fields."""
    purpose = f"{options} can be set, overridden and saved with the model's configuration"
    init, fields = seams_of(
        F.OPTIONS,
        (provider,),
        **{
            f"{provider}.{name}": patched(f"{module}:{provider}.{target}", purpose, kind=kind, since=since)
            for name, target, kind in (("init", "__init__", "function"), ("fields", "__dataclass_fields__", "value"))
        },
    )
    return init, fields


def _config(model: Model) -> tuple[Seam, ...]:
    row = read(
        f"{model.module}:{model.provider}[{model.config_field}, provide, cuda_graph_warmup_steps, use_te_rng_tracker]",
        "the vision encoder's configuration and what the check reads",
    )
    return seams_of(F.VISION, (model.provider,), **{f"{model.provider}.config": row})


def _stage(model: Model) -> tuple[Seam, ...]:
    row = patched(
        f"{model.module}:{model.provider}.provide(pre_process, post_process, vp_stage)",
        "an interleaved pipeline's model chunks know their virtual stage",
        f"{MODEL_OF_PROVIDER}(",
    )
    return seams_of(F.PIPELINES, (model.provider,), **{f"{model.provider}.provide": row})


_PIPELINES = seams_of(
    F.PIPELINES,
    tuple(model.provider for model in DROPS_STAGE),
    vlm_stage=called(
        f"{MODEL}:Qwen3VLModel(vp_stage)", "the model takes the virtual stage that it is of an interleaved pipeline"
    ),
)
_VISION = seams_of(
    F.VISION_QWEN3_VL,
    vision_config=read(
        f"{VISION_CONFIG}:get_vision_model_config(hf_config, megatron_config)",
        "the vision encoder's configuration says that it is on graphs",
        "config.cuda_graph_impl = megatron_config.vision_cuda_graph_impl",
    ),
    vision_padding=patched(f"{VISION_MODEL}.forward(self)", "warm-up and eager steps keep attention inside each image"),
    vision_padding_switch=swapped(
        f"{VISION_MODEL}._uses_vision_cuda_graph(self)",
        "says no while forward runs, so that upstream's own padding is not used",
    ),
    vision_forward=replayed(
        f"{VISION_MODEL}.forward(hidden_states, grid_thw, inference_params, extra_block_kwargs)",
        "a whole encoder's microbatch replays a graph",
    ),
    vision_parts=called(
        f"{VISION_MODEL}[patch_embed, pos_embed, rotary_pos_emb, decoder, merger, config]",
        "the parts that a recorded region runs in place of the encoder's forward",
    ),
    vision_block=called(
        f"{VISION_BLOCK}.forward(hidden_states, attention_mask, inference_params, rotary_pos_emb, packed_seq_params)",
        "the layers, with packed segments and rotary angles as arguments",
    ),
    vision_block_parts=read(
        f"{VISION_BLOCK}[layers, deepstack_merger_list]",
        "layers that become regions of their own; deepstack features are further outputs",
    ),
    patch_embedding=read(f"{PARTS}:Qwen3VLVisionPatchEmbed[proj]", "pixels enter a graph in the type of its weight"),
    rotary_frequencies=called(
        f"{PARTS}:Qwen3VLVisionRotaryEmbedding.forward(seqlen)",
        "the first call makes the buffer inv_freq",
        "register_buffer('inv_freq'",
    ),
)
_DEEPSTACK = seams_of(
    F.DEEPSTACK_GRADIENTS,
    deepstack_forward=patched(
        f"{MODEL}:Qwen3VLModel.forward(self, input_ids, pixel_values)",
        "under sequence parallelism the gradients of deepstack features are summed over the ranks",
        *("deepstack_visual_embeds = deepstack_feature_lists", "tp_size=self.pg_collection.tp.size()"),
    ),
    deepstack_split=swapped(
        f"{MODEL}:split_deepstack_embs(visual_pos_masks, deepstack_visual_embeds, tp_size, sequence_parallel)",
        "a plain slice of the features, whose backward sums nothing; it gets features that do",
        "for deepstack_visual_embed in deepstack_visual_embeds:",
        "tmp_slice_tensor.append(deepstack_visual_embed[tp_slice])",
        "deepstack_visual_embeds_ret.append(torch.cat(tmp_slice_tensor, dim=0))",
    ),
)
_PARTS = seams_of(
    (F.VISION_QWEN3_VL, F.FULL_ITERATION),
    vision_configuration=read(
        f"{VISION_CONFIG}:Qwen3VLTransformerConfig",
        "patch, merge and head sizes, and how many layers give deepstack features",
        has="spatial_merge_size temporal_patch_size patch_size in_channels "
        "num_position_embeddings hidden_size kv_channels deepstack_visual_indexes",
    ),
    vlm_parts=read(
        f"{MODEL}:Qwen3VLModel[vision_model, language_model, config]",
        "the vision model, the language model and the provider are found through the model that holds them",
    ),
)
_ROTARY = seams_of(
    (F.VISION_QWEN3_VL, F.PACKED_QWEN3_VL),
    vision_attention=swapped(
        f"{ATTENTION}:Qwen3VLSelfAttention.forward(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)",
        "queries and keys are rotated where they are projected while work is recorded",
        *("get_query_key_value_tensors", "apply_rotary_pos_emb_absolute"),
    ),
    vision_projection=swapped(
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        "the projection to queries, keys and values rotates them while work is recorded",
        "linear_qkv",
        takes="hidden_states key_value_states",
    ),
    rotary_kernel=swapped(
        f"{ATTENTION}:apply_rotary_pos_emb_absolute(t, freqs, config, cu_seqlens)",
        "one kernel in its place while work is recorded",
    ),
)
SEAMS = (
    *(seam for model in WITH_ENCODERS for seam in (*field_seams(*model[:2]), *_config(model))),
    *(seam for model in LANGUAGE_MODELS for seam in field_seams(*model, "packed-sequence options")),
    *(seam for model in DROPS_STAGE for seam in _stage(model)),
    *(*_PIPELINES, *_VISION, *_DEEPSTACK, *_PARTS, *_ROTARY),
)
