"""Seams of Bridge's train loop, configuration and batch steps."""

from ..encoders import declared
from ..seam import GRAPHS, Feature, Seam, called, patched, read, touched

TRAIN = "megatron.bridge.training.train"
CONFIG = "megatron.bridge.training.config"
CALLBACKS = "megatron.bridge.training.callbacks"
INITIALIZE = "megatron.bridge.training.initialize"
STATE = "megatron.bridge.training.state"
RERUNS = "megatron.core.rerun_state_machine"
VISUAL_INPUTS = "megatron.bridge.training.utils.visual_inputs"
QWEN3_VL_STEP = "megatron.bridge.models.qwen_vl.qwen3_vl_step"
TOWER_FEATURES = tuple(encoder.feature for encoder in declared())
# What a configuration is checked for. Graphs that upstream runs itself train without the check.
CHECKED = (*GRAPHS, Feature.CORE_OFFLOAD)


def _batches(step: str, features: tuple[str, ...]) -> Seam:
    """Return the seam of a forward step's module."""
    return patched(
        f"host_grids.{step.rpartition('.')[2]}",
        f"{step}:get_batch_from_iterator",
        "replays know the images' sizes, and how a batch is packed, without waiting for the device",
        features,
        "hooks.data.batches",
        takes="data_iterator",
    )


def _steps() -> tuple[Seam, ...]:
    """Return the seams of forward steps whose batches have images."""
    found: dict[str, list[str]] = {QWEN3_VL_STEP: [Feature.VISION_QWEN3_VL, Feature.PACKED_QWEN3_VL]}
    for encoder in declared():
        if encoder.encodes == "vision":
            for step in encoder.model.steps:
                found.setdefault(step, []).append(encoder.feature)
    return tuple(_batches(step, tuple(features)) for step, features in found.items())


SEAMS = (
    patched(
        "train_helper",
        f"{TRAIN}:VisionTECudaGraphHelper",
        "the train loop drives the plugin's vision graphs",
        Feature.VISION_QWEN3_VL,
        "hooks.loops.train_loop",
        touch="replaced",
        takes="model vision_config vision_seq_length micro_batch_size num_microbatches",
        has="create_cudagraphs graphs_created cuda_graph_set_manual_hooks delete_cuda_graphs",
    ),
    patched(
        "train_seq_length",
        f"{TRAIN}:get_vision_cuda_graph_seq_length",
        "the log line names the largest bucket",
        Feature.REPORTS,
        "hooks.loops.train_loop",
        touch="replaced",
        takes="vision_config",
    ),
    patched(
        "train_find_encoder",
        f"{TRAIN}:get_attr_wrapped_model",
        "a model that holds its encoder under another name than vision_model trains with vision graphs",
        TOWER_FEATURES,
        "hooks.loops.train_loop",
        takes="model attr allow_none return_model_obj",
    ),
    patched(
        "train_step",
        f"{TRAIN}:train_step",
        "steps are counted; a train loop without vision graphs gets them here",
        (Feature.VISION, Feature.PACKED),
        "hooks.loops.train_loop",
        takes="model global_state",
    ),
    patched(
        "train_log",
        f"{TRAIN}:training_log",
        "graph statistics reach TensorBoard and W&B",
        Feature.REPORTS,
        "hooks.loops.train_loop",
        takes="loss_dict global_state",
    ),
    patched(
        "train_end",
        f"{TRAIN}:_delete_cuda_graphs",
        "graphs are reported and freed when training ends",
        GRAPHS,
        "hooks.loops.train_loop",
    ),
    read(
        "train_loop",
        f"{TRAIN}:train",
        "the loop looks these functions up in its module, so replacing them there reaches it",
        GRAPHS,
        uses=("train_step", "training_log(", "_delete_cuda_graphs("),
    ),
    read(
        "train_loop_vision",
        f"{TRAIN}:train",
        "the loop makes the helper, captures after warm-up and needs no more of it",
        Feature.VISION_QWEN3_VL,
        uses=(
            "VisionTECudaGraphHelper(",
            "vision_cuda_graph_helper.graphs_created()",
            "vision_cuda_graph_helper.create_cudagraphs()",
        ),
    ),
    patched(
        "value_checks",
        f"{RERUNS}:RerunStateMachine.validate_result",
        "NaN and Inf in losses and gradients are looked for without waiting for the device",
        Feature.CHECKS,
        "hooks.loops.loss_checks",
        takes="result rejection_func message fatal",
        uses=("if self.mode == RerunMode.DISABLED:", "result_rejected: bool = rejection_func(result)"),
    ),
    patched(
        "rerun_question",
        f"{RERUNS}:RerunStateMachine.should_run_forward_backward",
        "the verdicts of a step are read before its optimizer's step, or left to it",
        Feature.CHECKS,
        "hooks.loops.loss_checks",
        takes="data_iterator",
        uses=("if self.mode == RerunMode.DISABLED:",),
    ),
    read(
        "rerun_loop",
        f"{TRAIN}:train_step",
        "the loop asks once more before the optimizer's step",
        Feature.CHECKS,
        uses=("while rerun_state_machine.should_run_forward_backward(data_iterator):", "optimizer.step()"),
    ),
    patched(
        "config_check",
        f"{CONFIG}:ConfigContainer.validate",
        "options that cannot work are refused before the model is built",
        CHECKED,
        "hooks.configuration.training_config",
        takes="self",
    ),
    read(
        "config_sections",
        f"{CONFIG}:ConfigContainer",
        "the check reads these sections",
        CHECKED,
        has="model rng ddp train dist",
    ),
    read(
        "global_state",
        f"{STATE}:GlobalState",
        "steps and configuration of a run",
        (Feature.VISION, Feature.PACKED, Feature.REPORTS),
        has="train_state cfg",
    ),
    read(
        "loggers",
        f"{STATE}:GlobalState",
        "where figures are logged",
        Feature.REPORTS,
        has="tensorboard_logger wandb_logger",
    ),
    called(
        "callbacks",
        f"{CALLBACKS}:Callback",
        "the main job records steps and evaluations; the plugin itself asks users for no callback",
        Feature.SCRIPTS,
        has="on_train_start on_train_step_start on_train_step_end on_train_end on_eval_end",
    ),
    *_steps(),
    read(
        "visual_inputs",
        f"{VISUAL_INPUTS}:GenericVisualInputs",
        "a batch carries its grids in these fields",
        Feature.VISION,
        has="image_grid_thw video_grid_thw image_sizes",
    ),
    patched(
        "page_locked_images",
        f"{VISUAL_INPUTS}:GenericVisualInputs",
        "data loaders page-lock images with the rest of a batch",
        Feature.COPIES,
        "hooks.data.batch_copies",
    ),
    touched(
        "instance",
        "dataset_helper",
        f"{INITIALIZE}:compile_helpers",
        "training starts on wheels, which ship the helper compiled and cannot compile it",
        Feature.SCRIPTS,
        undo="undone when training ends",
    ),
)


RECIPES = "megatron.bridge.recipes"
NAMES_BY_TASK = "0.6.2"  # the first release whose recipes of these models the presets derive from

RECIPE_SEAMS = tuple(
    touched(
        "extended",
        name,
        f"{module}",
        "presets are found by name where Bridge's own recipes are",
        Feature.RECIPES,
        undo="deactivate() takes the names off",
        patched_by="hooks.configuration.recipe_names",
        since=NAMES_BY_TASK,
    )
    for name, module in (("recipe_names", RECIPES), ("recipe_names.qwen_vl", f"{RECIPES}.qwen_vl"))
)


PARSER, OVERRIDES, UTILITIES = "argument_parser", "utils.overrides", "utils.utils"

PERFORMANCE_SEAMS = (
    patched(
        "performance_parser",
        f"{PARSER}:parse_cli_args",
        "the performance scripts have the graph flags",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        packaged=False,
    ),
    patched(
        "performance_overrides",
        f"{OVERRIDES}:_set_cuda_graph_overrides",
        "vision graphs keep their random-state tracker when the language model has no graphs",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe cuda_graph_impl cuda_graph_scope",
        packaged=False,
    ),
    patched(
        "performance_user_overrides",
        f"{OVERRIDES}:set_user_overrides",
        "graph flags of the performance scripts reach the configuration",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe args",
        packaged=False,
    ),
    patched(
        "performance_words",
        f"{OVERRIDES}:set_cli_overrides",
        "graph flags that the parser did not know, since it was imported before PyTorch, are no Hydra words",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe cli_overrides",
        packaged=False,
    ),
    patched(
        "performance_recipes",
        f"{UTILITIES}:apply_argparse_overrides",
        "graph flags reach the configuration with --use_recipes too",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="config args",
        since="0.6.2",
        packaged=False,
    ),
    patched(
        "hydra_words",
        "megatron.bridge.training.utils.omegaconf_utils:process_config_with_overrides",
        "graph flags among Hydra words, from performance scripts with --use_recipes",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="config cli_overrides",
    ),
)


MODULE = "megatron.core.pipeline_parallel.schedules"
SCHEDULES = {
    "schedule_alone": "forward_backward_no_pipelining",
    "schedule_pipeline": "forward_backward_pipelining_without_interleaving",
    "schedule_interleaved": "forward_backward_pipelining_with_interleaving",
}

LOOP_SEAMS = (
    *(
        touched(
            "extended",
            name,
            f"{MODULE}:{target}",
            "a loop that calls the schedule itself trains with graphs",
            Feature.LOOPS,
            undo="deactivate() puts the same object back",
            patched_by="hooks.loops.any_loop",
            kind="function",
            takes="model num_microbatches forward_only",
        )
        for name, target in SCHEDULES.items()
    ),
    read(
        "schedule_lookup",
        f"{MODULE}:get_forward_backward_func",
        "loops get the schedules from here, by name when they ask",
        Feature.LOOPS,
        uses=tuple(SCHEDULES.values()),
    ),
)
