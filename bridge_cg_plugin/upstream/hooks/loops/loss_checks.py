"""Checks of losses and gradients for NaN and Inf, read once for a step instead of in every microbatch.

Upstream's host waits for the device at each check. Where reruns are disabled, a rejected value ends the run with an
error. On graphs the host reads the verdicts once the step's last backward has been launched, and upstream's own check
of the first rejected value raises its error then, before the optimizer's step. In Bridge's training step the host reads
them later, right before the optimizer changes a parameter: Megatron's optimizer has waited for the gradients' norm by
then. A rank whose optimizer changes nothing reads them at the end of the step. Other ranks may have finished their
optimizer's step: they wait for this rank in their next communication.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...seams.patches import Patch
from ...seams.registry import seam
from ..helpers.graph_helper import any_on_graphs

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
# Those of a training step that have launched their last backward; None outside of `left_to_optimizer`.
_unread: list[StepChecks] | None = None


@contextmanager
def left_to_optimizer() -> Iterator[None]:
    """Leave checks to the optimizer of the training step inside.

    Raises:
        RuntimeError: Upstream's error of the first rejected value.
    """
    global _unread
    _settle_before_optimizers()
    _unread = []
    try:
        yield
        _settle_unread()
    finally:
        _unread = None


def _settle_unread(*unused: Any) -> None:
    while _unread:
        _unread.pop(0).settle()


@functools.cache
def _settle_before_optimizers() -> None:
    """From now on, settle checks that were left to it before any optimizer of PyTorch's steps."""
    register_optimizer_step_pre_hook(_settle_unread)


def _kept(old: Callable[..., None]) -> Callable[..., None]:
    """Keep a check that ends the run for later."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def validate_result(self: Any, *args: Any, **kwargs: Any) -> None:
        checks = _pending.get(self)
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        result, rejects = call.arguments["result"], call.arguments["rejection_func"]
        if checks is None or not call.arguments["fatal"] or rejects not in REJECTED_BY_VALUE or not _is_one(result):
            return old(self, *args, **kwargs)
        value = result.detach().clone()  # schedules divide the loss in place
        call.arguments["result"] = value
        checks.add(functools.partial(old, *call.args, **call.kwargs), rejects(value))

    return validate_result


def _is_one(result: Any) -> bool:
    return isinstance(result, Tensor) and result.dim() == 0


def _read_between(old: Callable[..., bool]) -> Callable[..., bool]:
    """Read a step's verdicts, or leave them to its optimizer, when the loop asks whether to run it again."""

    @functools.wraps(old)
    def should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> bool:
        if (checks := _pending.pop(self, None)) is not None:
            if _unread is None:
                checks.settle()
            else:
                _unread.append(checks)
        runs = old(self, *args, **kwargs)
        if runs and self.mode == DISABLED and any_on_graphs():
            _pending[self] = StepChecks()
        return runs

    return should_run_forward_backward


PATCHES = (
    Patch(seam("value_checks"), _kept),
    Patch(seam("rerun_question"), _read_between),
)
