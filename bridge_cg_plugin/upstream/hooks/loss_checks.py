"""Checks of losses and gradients for NaN and Inf, read once for a step instead of in every microbatch.

Upstream's host waits for the device at each check. Where reruns are disabled, a rejected value ends the run with an
error. On graphs the host reads the verdicts once the step's last backward has been launched, and upstream's own check
of the first rejected value raises its error then, before the optimizer's step.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..seams.patches import Patch
from ..seams.registry import seam
from .graph_helper import any_on_graphs

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
    Patch(seam("value_checks"), _kept),
    Patch(seam("rerun_question"), _read_between),
)
