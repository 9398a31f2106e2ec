"""Comparing a replay with eager while training runs: outputs, and the gradient of each parameter."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..announce import announce, warn
from ..graphs.changes.source import Source
from ..graphs.recordings.recording import Gradients
from ..upstream_types import MegatronParameter

# The largest accepted relative L2 difference, by whether attention in graphs rounds as eager's.
TOLERANCES = {True: 0.05, False: 0.15}


class CheckFailedError(RuntimeError):
    """A replay differs from eager by more than the tolerance, and the user asked to stop."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Largest relative L2 differences of a replay from eager.

    Attributes:
        step: Training step.
        forward: Of any output.
        gradient: Of any parameter's gradient; None when no backward ran.
        parameter: Which parameter that was, by its place among the trainable ones.
    """

    step: int
    forward: float
    gradient: float | None = None
    parameter: int | None = None


class ReplayCheck:
    """Compares one microbatch of a step with eager. Made before the replay, which it observes.

    Args:
        step: Training step.
        eager: Runs the encoder eager on a copy of the microbatch, which training may overwrite.
        undone: Entered around passes that are to leave nothing behind.
        tolerance: Largest accepted relative L2 difference.
        stop: Whether a failure raises.
        results: The finished check is appended here.
    """

    def __init__(
        self,
        step: int,
        eager: Callable[[], tuple[Tensor, ...]],
        undone: Callable[[], AbstractContextManager[None]],
        tolerance: float,
        stop: bool,
        results: list[CheckResult],
    ) -> None:
        self._step, self._eager, self._undone = step, eager, undone
        self._source: Source  # set by `compare_outputs`, which comes before the backward
        self._tolerance, self._stop, self._results = tolerance, stop, results
        self._expected: list[Tensor | None] = []
        self._before: list[Tensor | None] = []

    def compare_outputs(self, outputs: Sequence[Tensor], source: Source) -> None:
        """Compare the outputs of a replay of a recording that was made from `source`."""
        self._source = source
        with self._undone(), torch.no_grad():
            expected = self._eager()
        self._forward = max(relative_difference(a, b) for a, b in zip(outputs, expected, strict=True))
        if not any(o.requires_grad for o in outputs):
            self._finish(CheckResult(self._step, self._forward))

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Run eager forward and backward and set its gradients aside. See `BackwardObserver`."""
        sinks = self._source.sinks
        self._before = [None if g is None else g.clone() for g in sinks.given]
        with self._undone(), torch.enable_grad(), self._source.aliases.active(sinks.handed) as aliases:
            with self._source.autocasting():
                outputs = self._eager()
            pairs = [
                (o, g) for o, g in zip(outputs, output_gradients, strict=True) if g is not None and o.requires_grad
            ]
            targets: list[MegatronParameter] = [aliases[p] for p in sinks.parameters]
            for target in targets:
                target.grad_added_to_main_grad = False
            gradients = torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True)
        self._expected = []
        for target, gradient, main, before in zip(targets, gradients, sinks.given, self._before, strict=True):
            added = target.grad_added_to_main_grad  # by a fused GEMM
            if main is not None and before is not None and added:
                gradient = main - before
                main.copy_(before)
            self._expected.append(gradient)

    def after_backward(self, gradients: Gradients) -> None:
        """Compare the replay's gradients; one that only one side has counts as zeros. See `BackwardObserver`."""
        worst, place = 0.0, None
        for index, (expected, main, before, returned) in enumerate(
            zip(self._expected, self._source.sinks.given, self._before, gradients.parameters, strict=True)
        ):
            actual = returned if returned is not None or main is None or before is None else main - before
            if expected is None and actual is None:
                continue
            difference = relative_difference(*(torch.zeros(()) if g is None else g for g in (actual, expected)))
            if place is None or not difference <= worst:
                worst, place = difference, index
        self._expected, self._before = [], []
        self._finish(CheckResult(self._step, self._forward, worst, place))

    def _finish(self, result: CheckResult) -> None:
        self._results.append(result)
        gradient = "no backward" if result.gradient is None else f"gradients {result.gradient:.2e}"
        text = f"step {result.step}: replay against eager: outputs {result.forward:.2e}, {gradient}"
        # Written so that a NaN fails.
        if result.forward <= self._tolerance and (result.gradient or 0.0) <= self._tolerance:
            announce(f"check passed, {text} (tolerance {self._tolerance:g})")
            return
        text = f"check FAILED, {text}, above {self._tolerance:g}"
        if self._stop:
            raise CheckFailedError(text)
        warn(text)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| in fp32; the numerator alone where `expected` is zero."""
    expected = expected.float()
    distance = (actual.float() - expected).norm()
    size = expected.norm()
    return float(distance / torch.where(size > 0, size, 1.0))
