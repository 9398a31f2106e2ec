"""Bridge's train loop: whose helper it drives, steps, logging, the end of training."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from ....graphs.joint_step import joint_step
from ....graphs.recordings.compiling import TURNS
from ....graphs.reports.report import metrics_of_ranks, pause_metrics
from ...encoders.registry import find_encoders
from ...parallel.watchdog import WATCHDOG, named_failure, several_ranks, timeout_s
from ...seams.patches import Patch, arguments_of
from ...seams.registry import seam
from ...wrappers import chunks_of, unwrapped
from ..helpers.full_iteration import CURRENT, all_graphs
from ..helpers.graph_helper import (
    active_graphs,
    active_helpers,
    asks_for_graphs,
    asks_for_vision_graphs,
    drop_graphs,
    modules_on_graphs,
)
from ..helpers.vision_helper import VisionTECudaGraphHelper, get_vision_cuda_graph_seq_length
from .any_loop import LOOPS
from .rank_figures import ALL_MODULES, Figures, pauses_of_ranks, phase_of, statistics_of_ranks

FIGURES = Figures()
# Those that Bridge's train loop does not make: it makes one for Qwen3-VL's encoder only.
OTHER_HELPERS: list[VisionTECudaGraphHelper] = []


def make_other_helpers(chunks: Sequence[nn.Module], provider: Any) -> None:
    """Make the helpers of other encoders, before the first step of a model that enables graphs.

    Raises:
        OptionError: An option cannot work.
    """
    if not asks_for_vision_graphs(provider):
        return
    encoders = [each for each in find_encoders(chunks) if not each.family.driven_by_bridge]
    graphed = [helper.graphs and helper.graphs.model for helper in OTHER_HELPERS]
    if encoders and [each.model for each in encoders] != graphed:
        for helper in OTHER_HELPERS:  # left behind by a run that ended with an error
            helper.delete_cuda_graphs()
        OTHER_HELPERS[:] = [VisionTECudaGraphHelper(chunks, provider, found=each) for each in encoders]


def _with_steps(old: Callable[..., Any]) -> Callable[..., Any]:
    argument = arguments_of(seam("train_step"), old)

    @functools.wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        state = argument("global_state", args, kwargs)
        chunks = chunks_of(argument("model", args, kwargs))
        LOOPS.leave_to_bridge(chunks)
        drop_graphs()
        make_other_helpers(chunks, state.cfg.model)
        capture_due(chunks, state.cfg.model)
        with ExitStack() as stack:
            if several_ranks() and asks_for_graphs(state.cfg.model):
                doing = f"step {state.train_state.step + 1}, {phase_of(active_helpers())}"
                stack.enter_context(named_failure(doing))
                stack.enter_context(WATCHDOG.during(doing, timeout_s(state.cfg)))
            stack.enter_context(joint_step(active_graphs()))
            if _captures_optimizer(state):  # kernels that are compiled ahead must not meet it
                stack.enter_context(TURNS.recording())
            return old(*args, **kwargs)

    return train_step


def capture_due(chunks: Sequence[nn.Module], provider: Any) -> None:
    """Capture what the loop did not: it does so before one iteration only, where it may fail or be skipped."""
    warmup_steps = getattr(provider, "cuda_graph_warmup_steps", math.inf)
    if due := [helper for helper in active_helpers() if helper.is_due(warmup_steps)]:
        own = modules_on_graphs(chunks)
        for helper in due:
            if helper.graphs is not None and helper.graphs.model in own:
                helper.create_cudagraphs()


def _captures_optimizer(state: Any) -> bool:
    optimizer = getattr(getattr(state, "cfg", None), "optimizer", None)
    return bool(getattr(optimizer, "optimizer_cuda_graph", False))


def _none_where_absent(old: Callable[..., Any]) -> Callable[..., Any]:
    """The loop looks for `vision_model`, expecting None without one; upstream's function raises instead."""

    @functools.wraps(old)
    def get_attr_wrapped_model(model: Any, attr: str, *args: Any, **kwargs: Any) -> Any:
        if attr == "vision_model" and not any(hasattr(module, attr) for module in unwrapped(model)):
            return None
        return old(model, attr, *args, **kwargs)

    return get_attr_wrapped_model


def _with_metrics(old: Callable[..., Any]) -> Callable[..., Any]:
    argument = arguments_of(seam("train_log"), old)

    @functools.wraps(old)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = old(*args, **kwargs)
        state = argument("global_state", args, kwargs)
        if state is not None and state.train_state.step % state.cfg.logger.log_interval == 0:
            found = statistics_of_ranks(all_graphs(), state.cfg.model)
            FIGURES.take(state.train_state.step, found)
            for group, ranks in found.items():
                write_metrics(state, metrics_of_ranks(list(ranks.values()), group))
            if len(found) > 1:
                write_metrics(state, pause_metrics(pauses_of_ranks(found), ALL_MODULES))
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
        CURRENT.delete_cuda_graphs()
        FIGURES.end()
        old(*args, **kwargs)

    return _delete_cuda_graphs


PATCHES = (
    Patch(seam("train_helper"), lambda old: VisionTECudaGraphHelper),
    Patch(seam("train_seq_length"), lambda old: get_vision_cuda_graph_seq_length),
    Patch(seam("train_find_encoder"), _none_where_absent),
    Patch(seam("train_step"), _with_steps),
    Patch(seam("train_log"), _with_metrics),
    Patch(seam("train_end"), _with_deletion),
)
