"""Seams of Bridge's train loop, configuration and batch steps."""

from ..encoders import declared
from ..seam import GRAPHS, Feature, Seam

TRAIN = "megatron.bridge.training.train"
CONFIG = "megatron.bridge.training.config"
CALLBACKS = "megatron.bridge.training.callbacks"
INITIALIZE = "megatron.bridge.training.initialize"
STATE = "megatron.bridge.training.state"
RERUNS = "megatron.core.rerun_state_machine"
VISUAL_INPUTS = "megatron.bridge.training.utils.visual_inputs"
QWEN3_VL_STEP = "megatron.bridge.models.qwen_vl.qwen3_vl_step"
TOWER_FEATURES = tuple(encoder.feature for encoder in declared())
RESTORED = "deactivate() puts the same object back"
# What a configuration is checked for. Graphs that upstream runs itself train without the check.
CHECKED = (*GRAPHS, Feature.CORE_OFFLOAD)


def _batches(step: str, features: tuple[str, ...]) -> Seam:
    """Return the seam of a forward step's module."""
    return Seam(
        name=f"host_grids.{step.rpartition('.')[2]}",
        module=step,
        target="get_batch_from_iterator",
        kind="function",
        touch="extended",
        purpose="replays know the images' sizes, and how a batch is packed, without waiting for the device",
        features=features,
        undo=RESTORED,
        parameters=("data_iterator",),
        patched_by="hooks.data.batches",
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
    Seam(
        name="train_helper",
        module=TRAIN,
        target="VisionTECudaGraphHelper",
        kind="class",
        touch="replaced",
        purpose="the train loop drives the plugin's vision graphs",
        features=(Feature.VISION_QWEN3_VL,),
        undo=RESTORED,
        parameters=("model", "vision_config", "vision_seq_length", "micro_batch_size", "num_microbatches"),
        attributes=("create_cudagraphs", "graphs_created", "cuda_graph_set_manual_hooks", "delete_cuda_graphs"),
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_seq_length",
        module=TRAIN,
        target="get_vision_cuda_graph_seq_length",
        kind="function",
        touch="replaced",
        purpose="the log line names the largest bucket",
        features=(Feature.REPORTS,),
        undo=RESTORED,
        parameters=("vision_config",),
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_find_encoder",
        module=TRAIN,
        target="get_attr_wrapped_model",
        kind="function",
        touch="extended",
        purpose="a model that holds its encoder under another name than vision_model trains with vision graphs",
        features=TOWER_FEATURES,
        undo=RESTORED,
        parameters=("model", "attr", "allow_none", "return_model_obj"),
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_step",
        module=TRAIN,
        target="train_step",
        kind="function",
        touch="extended",
        purpose="steps are counted; a train loop without vision graphs gets them here",
        features=(Feature.VISION, Feature.PACKED),
        undo=RESTORED,
        parameters=("model", "global_state"),
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_log",
        module=TRAIN,
        target="training_log",
        kind="function",
        touch="extended",
        purpose="graph statistics reach TensorBoard and W&B",
        features=(Feature.REPORTS,),
        undo=RESTORED,
        parameters=("loss_dict", "global_state"),
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_end",
        module=TRAIN,
        target="_delete_cuda_graphs",
        kind="function",
        touch="extended",
        purpose="graphs are reported and freed when training ends",
        features=GRAPHS,
        undo=RESTORED,
        patched_by="hooks.loops.train_loop",
    ),
    Seam(
        name="train_loop",
        module=TRAIN,
        target="train",
        kind="function",
        touch="read",
        purpose="the loop looks these functions up in its module, so replacing them there reaches it",
        features=GRAPHS,
        uses=("train_step", "training_log(", "_delete_cuda_graphs("),
    ),
    Seam(
        name="train_loop_vision",
        module=TRAIN,
        target="train",
        kind="function",
        touch="read",
        purpose="the loop makes the helper, captures after warm-up and needs no more of it",
        features=(Feature.VISION_QWEN3_VL,),
        uses=(
            "VisionTECudaGraphHelper(",
            "vision_cuda_graph_helper.graphs_created()",
            "vision_cuda_graph_helper.create_cudagraphs()",
        ),
    ),
    Seam(
        name="value_checks",
        module=RERUNS,
        target="RerunStateMachine.validate_result",
        kind="function",
        touch="extended",
        purpose="NaN and Inf in losses and gradients are looked for without waiting for the device",
        features=(Feature.CHECKS,),
        undo=RESTORED,
        parameters=("result", "rejection_func", "message", "fatal"),
        uses=("if self.mode == RerunMode.DISABLED:", "result_rejected: bool = rejection_func(result)"),
        patched_by="hooks.loops.loss_checks",
    ),
    Seam(
        name="rerun_question",
        module=RERUNS,
        target="RerunStateMachine.should_run_forward_backward",
        kind="function",
        touch="extended",
        purpose="the verdicts of a step are read before its optimizer's step, or left to it",
        features=(Feature.CHECKS,),
        undo=RESTORED,
        parameters=("data_iterator",),
        uses=("if self.mode == RerunMode.DISABLED:",),
        patched_by="hooks.loops.loss_checks",
    ),
    Seam(
        name="rerun_loop",
        module=TRAIN,
        target="train_step",
        kind="function",
        touch="read",
        purpose="the loop asks once more before the optimizer's step",
        features=(Feature.CHECKS,),
        uses=("while rerun_state_machine.should_run_forward_backward(data_iterator):", "optimizer.step()"),
    ),
    Seam(
        name="config_check",
        module=CONFIG,
        target="ConfigContainer.validate",
        kind="function",
        touch="extended",
        purpose="options that cannot work are refused before the model is built",
        features=CHECKED,
        undo=RESTORED,
        parameters=("self",),
        patched_by="hooks.configuration.training_config",
    ),
    Seam(
        name="config_sections",
        module=CONFIG,
        target="ConfigContainer",
        kind="class",
        touch="read",
        purpose="the check reads these sections",
        features=CHECKED,
        attributes=("model", "rng", "ddp", "train", "dist"),
    ),
    Seam(
        name="global_state",
        module=STATE,
        target="GlobalState",
        kind="class",
        touch="read",
        purpose="steps and configuration of a run",
        features=(Feature.VISION, Feature.PACKED, Feature.REPORTS),
        attributes=("train_state", "cfg"),
    ),
    Seam(
        name="loggers",
        module=STATE,
        target="GlobalState",
        kind="class",
        touch="read",
        purpose="where figures are logged",
        features=(Feature.REPORTS,),
        attributes=("tensorboard_logger", "wandb_logger"),
    ),
    Seam(
        name="callbacks",
        module=CALLBACKS,
        target="Callback",
        kind="class",
        touch="called",
        purpose="the main job records steps and evaluations; the plugin itself asks users for no callback",
        features=(Feature.SCRIPTS,),
        attributes=("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end", "on_eval_end"),
    ),
    *_steps(),
    Seam(
        name="visual_inputs",
        module=VISUAL_INPUTS,
        target="GenericVisualInputs",
        kind="class",
        touch="read",
        purpose="a batch carries its grids in these fields",
        features=(Feature.VISION,),
        attributes=("image_grid_thw", "video_grid_thw", "image_sizes"),
    ),
    Seam(
        name="page_locked_images",
        module=VISUAL_INPUTS,
        target="GenericVisualInputs",
        kind="class",
        touch="extended",
        purpose="data loaders page-lock images with the rest of a batch",
        features=(Feature.COPIES,),
        undo=RESTORED,
        patched_by="hooks.data.batch_copies",
    ),
    Seam(
        name="dataset_helper",
        module=INITIALIZE,
        target="compile_helpers",
        kind="function",
        touch="instance",
        purpose="training starts on wheels, which ship the helper compiled and cannot compile it",
        features=(Feature.SCRIPTS,),
        undo="undone when training ends",
    ),
)
