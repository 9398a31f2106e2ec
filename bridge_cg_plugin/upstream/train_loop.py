"""Bridge's train loop: whose helper it drives, steps, logging, the end of training."""

import functools
from collections.abc import Callable
from typing import Any

from .helper import VisionTECudaGraphHelper, active_helpers, get_vision_cuda_graph_seq_length
from .patches import Patch

TRAIN = "megatron.bridge.training.train"


def _with_steps(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        for helper in active_helpers():
            helper.graphs.begin_step()
        return old(*args, **kwargs)

    return train_step


def _with_metrics(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = old(*args, **kwargs)
        state = kwargs.get("global_state", args[11] if len(args) > 11 else None)
        if state is not None and state.train_state.step % state.cfg.logger.log_interval == 0:
            for helper in active_helpers():
                write_metrics(state, helper.graphs.metrics())
        return result

    return training_log


def write_metrics(state: Any, values: dict[str, float]) -> None:
    """Write scalars to the TensorBoard and W&B loggers that this rank has."""
    step = state.train_state.step
    if state.tensorboard_logger is not None:
        for tag, value in values.items():
            state.tensorboard_logger.add_scalar(tag, value, step)
    if state.wandb_logger is not None:
        state.wandb_logger.log(values, step)


def _with_deletion(old: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(old)
    def _delete_cuda_graphs(*args: Any, **kwargs: Any) -> None:
        for helper in active_helpers():
            helper.delete_cuda_graphs()
        old(*args, **kwargs)

    return _delete_cuda_graphs


PATCHES = (
    Patch(
        name="train_helper",
        module=TRAIN,
        target="VisionTECudaGraphHelper",
        make=lambda old: VisionTECudaGraphHelper,
        purpose="the train loop drives the plugin's vision graphs",
        parameters=("model", "vision_config", "vision_seq_length", "micro_batch_size", "num_microbatches"),
        optional=True,
    ),
    Patch(
        name="train_seq_length",
        module=TRAIN,
        target="get_vision_cuda_graph_seq_length",
        make=lambda old: get_vision_cuda_graph_seq_length,
        purpose="the log line names the largest bucket",
        parameters=("vision_config",),
        optional=True,
    ),
    Patch(
        name="train_step",
        module=TRAIN,
        target="train_step",
        make=_with_steps,
        purpose="the run-time check counts steps",
    ),
    Patch(
        name="train_log",
        module=TRAIN,
        target="training_log",
        make=_with_metrics,
        purpose="graph statistics reach TensorBoard and W&B",
        parameters=("loss_dict", "global_state"),
    ),
    Patch(
        name="train_end",
        module=TRAIN,
        target="_delete_cuda_graphs",
        make=_with_deletion,
        purpose="graphs are reported and freed when training ends",
    ),
)
