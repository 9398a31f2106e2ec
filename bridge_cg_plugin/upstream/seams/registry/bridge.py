"""Seams of Bridge: train loop, configuration, batch steps, providers, and Qwen3-VL's model and vision encoder."""

from functools import partial

from ....options.facts import ROWS
from ..encoders import (
    DECLARED,
    DECLARED_MODELS,
    GEMMA3_VL,
    MODELS,
    QWEN3_OMNI,
    QWEN3_VL,
    QWEN3_VL_MODELS,
    QWEN_VL,
    VLM_STEP,
    Model,
)
from ..seam import GRAPHS, OLDEST, Seam, called, patched, read, replayed, seams_of, swapped
from ..seam import Feature as F

TRAIN = "megatron.bridge.training.train"
CONFIG = "megatron.bridge.training.config:ConfigContainer"
STATE = "megatron.bridge.training.state:GlobalState"
VISUAL_INPUTS = "megatron.bridge.training.utils.visual_inputs:GenericVisualInputs"
RERUNS = "megatron.core.rerun_state_machine:RerunStateMachine"
QWEN3_VL_STEP, OMNI_STEP = f"{QWEN_VL}.qwen3_vl_step", QWEN3_OMNI.model.steps[-1]
GEMMA3 = f"{MODELS}.gemma.gemma3_provider"
PADDING = "megatron.bridge.training.utils.padding_utils"
RECIPES = "megatron.bridge.recipes"
NAMES_BY_TASK = "0.6.2"  # the first release whose recipes of these models the presets derive from
OVERRIDES = "utils.overrides"
MODULE = "megatron.core.pipeline_parallel.schedules"
SCHEDULES = {
    "schedule_alone": "forward_backward_no_pipelining",
    "schedule_pipeline": "forward_backward_pipelining_without_interleaving",
    "schedule_interleaved": "forward_backward_pipelining_with_interleaving",
}
_script = partial(patched, packaged=False)


def _steps() -> tuple[Seam, ...]:
    """Return the seams of forward steps whose batches have images."""
    steps: dict[str, tuple[str, ...]] = {QWEN3_VL_STEP: (F.VISION_QWEN3_VL, F.PACKED_QWEN3_VL)}
    for encoder in DECLARED:
        for step in encoder.model.steps if encoder.encodes == "vision" else ():
            steps[step] = (*steps.get(step, ()), encoder.feature)
    purpose = "replays know the images' sizes, and how a batch is packed, without waiting for the device"
    rows = {step: patched(f"{step}:get_batch_from_iterator(data_iterator)", purpose) for step in steps}
    return tuple(
        seam
        for step, row in rows.items()
        for seam in seams_of(steps[step], **{f"host_grids.{step.rpartition('.')[2]}": row})
    )


_LOOP_VISION = seams_of(
    F.VISION_QWEN3_VL,
    train_helper=patched(
        f"{TRAIN}:VisionTECudaGraphHelper",
        "the train loop drives the plugin's vision graphs",
        has="create_cudagraphs graphs_created cuda_graph_set_manual_hooks delete_cuda_graphs",
        takes="model vision_config vision_seq_length micro_batch_size num_microbatches",
    ),
    train_loop_vision=read(
        f"{TRAIN}:train",
        "the loop makes the helper, captures after warm-up and needs no more of it",
        *("VisionTECudaGraphHelper(", "vision_cuda_graph_helper.graphs_created()"),
        "vision_cuda_graph_helper.create_cudagraphs()",
    ),
)
_REPORTS = seams_of(
    F.REPORTS,
    train_log=patched(f"{TRAIN}:training_log(loss_dict, global_state)", "graph statistics reach TensorBoard and W&B"),
    loggers=read(f"{STATE}[tensorboard_logger, wandb_logger]", "where figures are logged"),
)
_TOWERS = seams_of(
    tuple(encoder.feature for encoder in DECLARED),
    train_find_encoder=patched(
        f"{TRAIN}:get_attr_wrapped_model(model, attr, allow_none, return_model_obj)",
        "a model that holds its encoder under another name than vision_model trains with vision graphs",
    ),
)
_LOOP = seams_of(
    GRAPHS,
    train_end=patched(f"{TRAIN}:_delete_cuda_graphs", "graphs are reported and freed when training ends"),
    train_loop=read(
        f"{TRAIN}:train",
        "the loop looks these functions up in its module, so replacing them there reaches it",
        *("train_step", "training_log(", "_delete_cuda_graphs("),
    ),
    train_step=patched(
        f"{TRAIN}:train_step(model, global_state)",
        "steps are counted; a train loop without vision graphs gets them here",
    ),
)
_CHECKS = seams_of(
    F.CHECKS,
    value_checks=patched(
        f"{RERUNS}.validate_result(result, rejection_func, message, fatal)",
        "NaN and Inf in losses and gradients are looked for without waiting for the device",
        *("if self.mode == RerunMode.DISABLED:", "result_rejected: bool = rejection_func(result)"),
    ),
    rerun_question=patched(
        f"{RERUNS}.should_run_forward_backward(data_iterator)",
        "the verdicts of a step are read before its optimizer's step",
        "if self.mode == RerunMode.DISABLED:",
    ),
    rerun_loop=read(
        f"{TRAIN}:train_step",
        "the loop asks once more before the optimizer's step",
        *("while rerun_state_machine.should_run_forward_backward(data_iterator):", "optimizer.step()"),
    ),
)
_CONFIG = seams_of(
    GRAPHS,  # graphs that upstream runs itself train without the check
    config_check=patched(f"{CONFIG}.validate(self)", "options that cannot work are refused before the model is built"),
    config_sections=read(f"{CONFIG}[model, rng, ddp, train, dist]", "the check reads these sections"),
)
_STATE = seams_of(
    (*GRAPHS, F.REPORTS),
    global_state=read(f"{STATE}[train_state, cfg]", "steps and configuration of a run"),
)
_BATCHES = seams_of(
    F.VISION,
    visual_inputs=read(
        f"{VISUAL_INPUTS}[image_grid_thw, video_grid_thw, image_sizes]", "a batch carries its grids in these fields"
    ),
)
_COPIES = seams_of(
    F.COPIES,
    page_locked_images=patched(VISUAL_INPUTS, "data loaders page-lock images with the rest of a batch"),
)
_RECIPES = seams_of(
    F.RECIPES,
    **{
        name: patched(module, "presets are found by name where Bridge's own recipes are", since=NAMES_BY_TASK)
        for name, module in (("recipe_names", RECIPES), ("recipe_names.qwen_vl", f"{RECIPES}.qwen_vl"))
    },
)
_PERFORMANCE = seams_of(
    F.PERFORMANCE,
    performance_user_overrides=_script(
        f"{OVERRIDES}:set_user_overrides(recipe, args)",
        "graph flags of the performance scripts reach the configuration, and vision graphs keep their tracker",
    ),
    performance_words=_script(
        f"{OVERRIDES}:set_cli_overrides(recipe, cli_overrides)",
        "graph flags, which the parser does not know, are no Hydra words",
    ),
    hydra_words=patched(
        "megatron.bridge.training.utils.omegaconf_utils:process_config_with_overrides(config, cli_overrides)",
        "graph flags among Hydra words, from performance scripts with --use_recipes",
    ),
)
_LOOPS = seams_of(
    F.LOOPS,
    **{
        name: patched(
            f"{MODULE}:{target}(model, num_microbatches, forward_only)",
            "a loop that calls the schedule itself trains with graphs",
        )
        for name, target in SCHEDULES.items()
    },
    schedule_lookup=read(
        f"{MODULE}:get_forward_backward_func",
        "loops get the schedules from here, by name when they ask",
        *SCHEDULES.values(),
    ),
)
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
    vision_padding=patched(
        f"{VISION_MODEL}._uses_vision_cuda_graph(self)",
        "warm-up and eager steps keep attention inside each image: upstream's own padding is not used",
    ),
    vision_forward=replayed(
        f"{VISION_MODEL}.forward(hidden_states, grid_thw, inference_params, extra_block_kwargs)",
        "a whole encoder's microbatch replays a graph, which runs these parts",
        *(
            "self.patch_embed(",
            "self.fast_pos_embed_interpolate(",
            "self.rot_pos_emb(",
            "self.decoder(",
            "self.merger(",
        ),
    ),
    vision_block=called(
        f"{VISION_BLOCK}.forward(hidden_states, attention_mask, inference_params, rotary_pos_emb, packed_seq_params)",
        "the layers, with packed segments and rotary angles as arguments; deepstack features are further outputs",
        *("self.layers", "self.deepstack_merger_list["),
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
_BETWEEN = seams_of(
    F.BETWEEN,
    step_padding=patched(
        f"{QWEN3_VL_STEP}:_pad_and_pack_qwen3_vl_step(tokens)",
        "tokens are padded on the host as well, and a pack's offsets and longest sequence computed there",
        since="0.6.2",
    ),
    batch_of_model=read(
        f"{MODEL}:Qwen3VLModel.forward",
        "the batch whose tokens, mask, grids and offsets are read before the encoder is launched",
        takes="self input_ids attention_mask packed_seq_params image_grid_thw video_grid_thw",
    ),
    image_tokens=patched(
        f"{MODEL}:reorganize_inputs(input_ids, image_grid_thw, video_grid_thw, image_input_mask, video_input_mask)",
        "image features are put into their places, and deepstack's added, by indices that the host computed",
    ),
    deepstack_parts=patched(
        f"{MODEL}:split_deepstack_embs(visual_pos_masks, deepstack_visual_embeds)",
        "the host counts the image features of each rank where it knows their places",
    ),
    packed_rows=patched(
        f"{MODEL}:preprocess_packed_seqs(input_ids, attention_mask, pre_process, pg_collection)",
        "samples are packed by what the host knows of their padding",
        "align_size = tp_size * cp_size * 2 if cp_size > 1 else tp_size",
        "input_ids_rmpad = torch.zeros(shape, dtype=input_ids.dtype, device=input_ids.device)",
        "input_ids_rmpad[start_idx:start_idx + seqlen] = input_ids[i, attention_mask[i]]",
    ),
    positions=patched(
        f"{MODEL}:get_rope_index(input_ids, image_grid_thw, video_grid_thw, attention_mask, packed_seq_params)",
        "positions of a batch with images are computed on the host",
    ),
    step_packing=read(
        f"{QWEN3_VL_STEP}:forward_step",
        "what the step packs keeps every token, padding included",
        *("original_tokens = tokens.clone()", "forward_args['input_ids'] = original_tokens"),
        "attention_mask = torch.ones(original_tokens.shape[0], original_tokens.shape[1], dtype=torch.bool",
        "forward_args['attention_mask'] = attention_mask",
    ),
)
_LENGTHS = (F.LANGUAGE_MODEL, F.FULL_ITERATION)


def _length(step: str, *models: str) -> tuple[Seam, ...]:
    purpose = "sequences have a length that language-model graphs replay"
    row = patched(f"{step}:get_batch(data_iterator, cfg)", purpose)
    return seams_of(_LENGTHS, models, **{f"language_model_length.{step.rpartition('.')[2]}": row})


_PADDING = seams_of(
    _LENGTHS,
    (*QWEN3_VL, *ROWS),
    **{
        f"language_model_length.{name}": called(
            f"{PADDING}:{name}_to_len(target_len, max_cap)", "pads one tensor of a batch to that length"
        )
        for name in ("pad_or_truncate_2d", "pad_or_truncate_attn", "pad_or_truncate_pos")
    },
)
_BIASES = seams_of(
    F.FULL_ITERATION,
    (GEMMA3_VL.model.provider,),
    biases=read(
        f"{GEMMA3}:Gemma3SelfAttention.forward",
        "a layer takes one of two tables of angles, and one of two biases",
        *("final_rotary_pos_emb = rotary_pos_emb[0]", "attention_bias = attention_bias[0]"),
        since="0.6.2",
    ),
)
_DECODER = seams_of(
    (F.PACKED_QWEN3_VL, F.FULL_ITERATION),
    packed_qwen3_vl_decoder=replayed(
        f"{BLOCK}:Qwen3VLTransformerBlock.forward",
        "the layers of a microbatch of Qwen3-VL's language model replay a graph",
        "self._deepstack_process(hidden_states, visual_pos_masks, deepstack_visual_embeds[l_no])",
        takes="hidden_states attention_mask rotary_pos_emb packed_seq_params visual_pos_masks deepstack_visual_embeds",
    ),
    packed_deepstack=swapped(
        f"{BLOCK}:Qwen3VLTransformerBlock._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)",
        "image features are added to every token, zero where there are none, while work is recorded",
    ),
)
_VARYING = seams_of(
    F.PACKED_QWEN3_VL,
    variable_lengths=patched(
        f"{MODEL}:Qwen3VLModel._expose_language_model_for_cuda_graph_helper(self)",
        "a model that is told that lengths vary may have packed graphs, which take any length",
        "self.language_model.config.variable_seq_lengths",
    ),
)
SEAMS = (
    *(*_LOOP_VISION, *_REPORTS, *_TOWERS, *_LOOP, *_CHECKS, *_CONFIG, *_STATE, *_steps(), *_BATCHES),
    *(*_COPIES, *_RECIPES, *_PERFORMANCE, *_LOOPS),
    *(seam for model in WITH_ENCODERS for seam in (*field_seams(*model[:2]), *_config(model))),
    *(seam for model in LANGUAGE_MODELS for seam in field_seams(*model, "packed-sequence options")),
    *(seam for model in DROPS_STAGE for seam in _stage(model)),
    *(*_PIPELINES, *_VISION, *_DEEPSTACK, *_PARTS, *_ROTARY),
    *(*_length(QWEN3_VL_STEP, *QWEN3_VL), *_length(VLM_STEP, *ROWS), *_length(OMNI_STEP, QWEN3_OMNI.model.provider)),
    *(*_BETWEEN, *_PADDING, *_BIASES, *_DECODER, *_VARYING),
)
