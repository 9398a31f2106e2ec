"""Bridge's train loop: whose helper it drives, steps, logging with the figures of all ranks, the end of training.

Upstream's host waits for the device at each check of a loss or gradient for NaN and Inf. Where reruns are disabled, a
rejected value ends the run with an error. On graphs the host reads the verdicts once the step's last backward has been
launched, and upstream's own check of the first rejected value raises its error then, before the optimizer's step.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from ...announce import announce
from ...graphs.manager import GraphManager
from ...graphs.reports import RegionStatistics, merge_statistics, metrics_of_ranks, render_steps
from ...options.graph_options import asks_for_graphs, asks_for_packed_graphs
from ..parallel.watchdog import WATCHDOG, meet_ranks, several_ranks
from ..seams.patches import Patch, arguments_of
from ..seams.registry import seam
from ..wrappers import chunks_of, unwrapped
from .any_loop import LOOPS
from .helpers.graph_helper import active_graphs, any_on_graphs

SHORT_REPORT_STEPS = 100


class DrivenBySteps:
    """Stands in for megatron-core's graph helpers, which Bridge's loop makes: the driver of its steps has the graphs.

    The arguments, those of upstream's classes, are the driver's business.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._created = False

    def create_cudagraphs(self) -> None:
        """Capture what is due now, where the loop has taken its hooks off the parameters."""
        LOOPS.capture_bridges()
        self._created = True

    def graphs_created(self) -> bool:
        """Whether there is nothing to capture for the loop, and nothing to delete."""
        return self._created

    def cuda_graph_set_manual_hooks(self) -> None:
        """Nothing to set: every replay waits for the parameters itself."""

    delete_cuda_graphs = cuda_graph_set_manual_hooks


def _for_packs(old: type) -> type:
    """Return megatron-core's helper class, which gives way where packed-sequence graphs are on."""

    class TECudaGraphHelper(old):
        def __new__(cls, model: Sequence[nn.Module], config: Any, *args: Any, **kwargs: Any) -> Any:
            return DrivenBySteps() if asks_for_packed_graphs(config) else super().__new__(cls)

    TECudaGraphHelper.__qualname__ = old.__qualname__
    TECudaGraphHelper.__module__, TECudaGraphHelper.__doc__ = old.__module__, old.__doc__
    return TECudaGraphHelper


def _with_steps(old: Callable[..., Any]) -> Callable[..., Any]:
    argument = arguments_of(seam("train_step"), old)

    @functools.wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        state = argument("global_state", args, kwargs)
        driver = LOOPS.bridges_driver(chunks_of(argument("model", args, kwargs)), state.cfg.model)
        with ExitStack() as stack:
            if several_ranks() and asks_for_graphs(state.cfg.model):
                step, limit_s = f"step {state.train_state.step + 1}", 60.0 * state.cfg.dist.distributed_timeout_minutes
                meet_ranks(limit_s)
                stack.enter_context(WATCHDOG.during(step, limit_s))
            if driver is not None:
                stack.enter_context(driver.step())
            return old(*args, **kwargs)

    return train_step


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
            for group, ranks in statistics_of_ranks(active_graphs(), state.cfg.model).items():
                write_metrics(state, metrics_of_ranks(ranks, group))
                announce_short_report(group, ranks, state.train_state.step, state.cfg.logger.log_interval)
        return result

    return training_log


def announce_short_report(group: str, ranks: Sequence[RegionStatistics], step: int, log_interval: int) -> None:
    """Print what happened so far with the first logged step of every hundred."""
    if step % SHORT_REPORT_STEPS < log_interval and (said := render_steps(ranks, f"{group}, to step {step}")):
        announce(said)


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
        LOOPS.end_bridges()
        old(*args, **kwargs)

    return _delete_cuda_graphs


def statistics_of_ranks(modules: Sequence[GraphManager], config: Any) -> dict[str, list[RegionStatistics]]:
    """Return the statistics of every rank that has some, by the name that loggers give a module's figures.

    All ranks call it together, those without graphs too: the rank that has loggers may be one without an encoder. Where
    the configuration asks for no graphs nothing is exchanged.

    Args:
        modules: This rank's modules.
        config: The model provider, alike on all ranks.
    """
    parts: dict[str, list[RegionStatistics]] = {}
    for module in modules:
        parts.setdefault(module.workload.group, []).append(module.statistics())
    own = {group: merge_statistics(found) for group, found in parts.items()}
    ranks: list[Any] = [own]
    if several_ranks() and asks_for_graphs(config):
        ranks = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own)
    groups = dict.fromkeys(group for rank in ranks for group in rank)
    return {group: [rank[group] for rank in ranks if group in rank] for group in groups}


DISABLED = "disabled"
REJECTED_BY_VALUE = (torch.isnan, torch.isinf)


class StepChecks:
    """The checks of one step that were not read yet."""

    def __init__(self) -> None:
        self._checks: list[tuple[Callable[[], None], Tensor]] = []
        self._copied: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # hooks of autograd may check on other streams

    def add(self, check: Callable[[], None], verdict: Tensor) -> None:
        """Keep a check for later.

        Args:
            check: Makes it as upstream does.
            verdict: A bool scalar on any device: whether the value is rejected.
        """
        self._checks.append((check, verdict.to("cpu", non_blocking=True)))
        if verdict.is_cuda:
            stream = torch.cuda.current_stream(verdict.device)
            self._copied[stream] = stream.record_event()

    def settle(self) -> None:
        """Read all verdicts; upstream's check of the first rejected value raises its error."""
        for copied in self._copied.values():
            copied.synchronize()
        for check, verdict in self._checks:
            if verdict:
                check()


# Of each state machine whose forwards and backwards are under way.
_pending: WeakKeyDictionary[Any, StepChecks] = WeakKeyDictionary()


def _kept(old: Callable[..., None]) -> Callable[..., None]:
    """Keep a check that ends the run for later."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def validate_result(self: Any, *args: Any, **kwargs: Any) -> None:
        checks = _pending.get(self)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        result, rejects = call.arguments["result"], call.arguments["rejection_func"]
        is_one = isinstance(result, Tensor) and result.dim() == 0
        if checks is None or not call.arguments["fatal"] or rejects not in REJECTED_BY_VALUE or not is_one:
            return old(self, *args, **kwargs)
        value = result.detach().clone()  # schedules divide the loss in place
        call.arguments["result"] = value
        checks.add(functools.partial(old, *call.args, **call.kwargs), rejects(value))

    return validate_result


def _read_between(old: Callable[..., bool]) -> Callable[..., bool]:
    """Read a step's verdicts when the loop asks whether to run it again."""

    @functools.wraps(old)
    def should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> bool:
        if (checks := _pending.pop(self, None)) is not None:
            checks.settle()
        runs = old(self, *args, **kwargs)
        if runs and self.mode == DISABLED and any_on_graphs():
            _pending[self] = StepChecks()
        return runs

    return should_run_forward_backward


PATCHES = (
    Patch(seam("train_helper"), lambda old: DrivenBySteps),
    Patch(seam("packed_helper"), _for_packs),
    Patch(seam("train_find_encoder"), _none_where_absent),
    Patch(seam("train_step"), _with_steps),
    Patch(seam("train_log"), _with_metrics),
    Patch(seam("train_end"), _with_deletion),
    Patch(seam("value_checks"), _kept),
    Patch(seam("rerun_question"), _read_between),
)
