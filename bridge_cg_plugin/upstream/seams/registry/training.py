"""Seams of Bridge's train loop, configuration and batch steps."""

from functools import partial

from ..encoders import DECLARED, QWEN_VL
from ..seam import GRAPHS, Seam, called, patched, read, seams_of, swapped
from ..seam import Feature as F

TRAIN = "megatron.bridge.training.train"
CONFIG = "megatron.bridge.training.config:ConfigContainer"
STATE = "megatron.bridge.training.state:GlobalState"
VISUAL_INPUTS = "megatron.bridge.training.utils.visual_inputs:GenericVisualInputs"
RERUNS = "megatron.core.rerun_state_machine:RerunStateMachine"
QWEN3_VL_STEP = f"{QWEN_VL}.qwen3_vl_step"
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


_VISION = seams_of(
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
    train_seq_length=patched(
        f"{TRAIN}:get_vision_cuda_graph_seq_length(vision_config)", "the log line names the largest bucket"
    ),
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
_STEP = seams_of(
    (F.VISION, F.PACKED),
    train_step=patched(
        f"{TRAIN}:train_step(model, global_state)",
        "steps are counted; a train loop without vision graphs gets them here",
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
    (F.VISION, F.PACKED, F.REPORTS),
    global_state=read(f"{STATE}[train_state, cfg]", "steps and configuration of a run"),
)
_SCRIPTS = seams_of(
    F.SCRIPTS,
    callbacks=called(
        "megatron.bridge.training.callbacks:Callback",
        "the main job records steps and evaluations; the plugin itself asks users for no callback",
        has="on_train_start on_train_step_start on_train_step_end on_train_end on_eval_end",
    ),
    dataset_helper=swapped(
        "megatron.bridge.training.initialize:compile_helpers",
        "training starts on wheels, which ship the helper compiled and cannot compile it",
    ),
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
    performance_parser=_script("argument_parser:parse_cli_args", "the performance scripts have the graph flags"),
    performance_overrides=_script(
        f"{OVERRIDES}:_set_cuda_graph_overrides(recipe, cuda_graph_impl, cuda_graph_scope)",
        "vision graphs keep their random-state tracker when the language model has no graphs",
    ),
    performance_user_overrides=_script(
        f"{OVERRIDES}:set_user_overrides(recipe, args)",
        "graph flags of the performance scripts reach the configuration",
    ),
    performance_words=_script(
        f"{OVERRIDES}:set_cli_overrides(recipe, cli_overrides)",
        "graph flags that the parser did not know, since it was imported before PyTorch, are no Hydra words",
    ),
    performance_recipes=_script(
        "utils.utils:apply_argparse_overrides(config, args)",
        "graph flags reach the configuration with --use_recipes too",
        since="0.6.2",
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
SEAMS = (
    *(*_VISION, *_REPORTS, *_TOWERS, *_STEP, *_LOOP, *_CHECKS, *_CONFIG, *_STATE, *_SCRIPTS, *_steps(), *_BATCHES),
    *(*_COPIES, *_RECIPES, *_PERFORMANCE, *_LOOPS),
)
