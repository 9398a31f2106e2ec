"""How an encoder's microbatch runs: replayed, timed or compared with eager, or eager where that is the faster."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce, warn
from ..attention_bounds import deterministic
from ..graphs.changes.source import Source
from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.recordings.recording import Gradients
from ..graphs.region import Region
from ..graphs.workload import Call, Eager, Manager
from ..options import VisionGraphOptions
from ..upstream_types import MegatronParameter
from .adapter import EncoderAdapter, EncoderBatch, EncoderFamily
from .eager_costs import Clock, CudaClock, MeasuredCosts, remember, watch_backward
from .fit import Shape

EagerForward = Callable[[EncoderBatch], tuple[Tensor, ...]]


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
    """Compares one microbatch of a step with eager.

    Args:
        eager: Runs the encoder eager on a batch.
        undone: Entered around passes that are to leave nothing behind.
        tolerance: Largest accepted relative L2 difference.
        stop: Whether a failure raises.
        results: Finished checks are appended here.
    """

    def __init__(
        self,
        eager: EagerForward,
        undone: Callable[[], AbstractContextManager[None]],
        tolerance: float,
        stop: bool,
        results: list[CheckResult],
    ) -> None:
        self._eager, self._undone = eager, undone
        self._source: Source  # set by `compare_outputs`, which comes before the backward
        self._tolerance, self._stop, self._results = tolerance, stop, results
        self._expected: list[Tensor | None] = []
        self._before: list[Tensor | None] = []

    def start(self, step: int, batch: EncoderBatch) -> None:
        """Begin a check; the batch's tensors are copied, as training may overwrite them."""
        self._step = step
        self._batch = batch.copied()

    def compare_outputs(self, outputs: Sequence[Tensor], source: Source) -> None:
        """Compare the outputs of a replay of a recording that was made from `source`."""
        self._source = source
        with self._undone(), torch.no_grad():
            expected = self._eager(self._batch)
        self._forward = max(relative_difference(a, b) for a, b in zip(outputs, expected, strict=True))
        if not any(o.requires_grad for o in outputs):
            self._finish(CheckResult(self._step, self._forward))

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Run eager forward and backward and set its gradients aside. See `BackwardObserver`."""
        self._before = [None if g is None else g.clone() for g in self._source.sinks.given]
        with (
            self._undone(),
            torch.enable_grad(),
            self._source.aliases.active(self._source.sinks.handed) as aliases,
        ):
            with self._source.autocasting():
                outputs = self._eager(self._batch)
            pairs = [
                (o, g) for o, g in zip(outputs, output_gradients, strict=True) if g is not None and o.requires_grad
            ]
            targets: list[MegatronParameter] = [aliases[p] for p in self._source.sinks.parameters]
            for target in targets:
                target.grad_added_to_main_grad = False
            gradients = torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True)
        self._expected = []
        for target, gradient, main, before in zip(
            targets, gradients, self._source.sinks.given, self._before, strict=True
        ):
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


# What a check accepts, by whether attention in graphs rounds as eager's.
TOLERANCES = {True: 0.05, False: 0.15}


class EncoderRuns:
    """Runs the microbatches of one encoder.

    Args:
        manager: The encoder's.
        options: What the user asked for.
        family: The encoder's upstream side.
        adapter: The encoder's.
        clock: Times microbatches; None takes device events, and no times without a GPU.

    Attributes:
        checks: Results of the run-time check.
        costs: Measured times; None where times must not decide.
    """

    def __init__(
        self,
        manager: Manager,
        options: VisionGraphOptions,
        family: EncoderFamily,
        adapter: EncoderAdapter,
        clock: Clock | None = None,
    ) -> None:
        self._manager, self._options, self._family, self._adapter = manager, options, family, adapter
        self.checks: list[CheckResult] = []
        self.costs = measured_costs(manager.model, manager.executor.device, options, clock)
        self._chosen: dict[Shape, Bucket | None] = {}
        self._checked_step = 0

    def forget(self) -> None:
        """Forget what replays took: their graphs are gone."""
        self._chosen = {}
        if self.costs is not None:
            self.costs.forget_replays()

    def grown(self) -> None:
        """Forget which bucket a shape takes: there are more."""
        self._chosen = {}

    def replay(self, region: Region, batch: EncoderBatch) -> tuple[Tensor, ...] | None:
        """Replay a batch, unless eager is the faster; returns None where it is to run eager, the reason counted.

        Raises:
            CheckFailedError: The replay differs from eager, and the user asked to stop.
        """
        costs = self._timed_costs() if self.costs is not None else None
        bucket = self._bucket(region, batch) if costs is not None else None
        if costs is not None and bucket is not None and costs.eager_is_faster(batch.shape, bucket):
            self._manager.fell_back(Fallback.EAGER_IS_FASTER, batch.tokens)
            region.clear()
            return None
        if self._options.check_interval > 0 and self._check_is_due():
            return self._checked(region, batch)
        timing = costs.time_replay(bucket) if costs is not None and bucket is not None else None
        outputs = region.run(batch, timing)
        if timing is not None:
            timing.forward_ended()
        return outputs

    def eager(self, call: Call, eager: Eager) -> Any:
        """Run a call eager."""
        if self._manager.captured:
            self._family.before_eager((self._manager.model,))
        costs = self._timed_costs() if call.refusal is None else None
        timing = costs.time_eager(call.batch) if costs is not None else None
        returned = eager()
        if timing is not None and (first := self._adapter.outputs(returned)[0]).requires_grad:
            timing.forward_ended()
            watch_backward(timing, first)
        return returned

    def _timed_costs(self) -> MeasuredCosts | None:
        """Return where this microbatch is timed, None where it is not."""
        return self.costs if not self._manager.is_paused and self._trains() else None

    def _trains(self) -> bool:
        return self._manager.model.training and torch.is_grad_enabled()

    def _bucket(self, region: Region, batch: EncoderBatch) -> Bucket | None:
        """Return the bucket that a training microbatch takes, remembered by its shape."""
        shape = batch.shape
        if shape not in self._chosen:
            found = region.choose(batch)
            remember(self._chosen, shape, found if isinstance(found, Bucket) else None)
        return self._chosen[shape]

    def _check_is_due(self) -> bool:
        step = self._manager.step_number
        return step != self._checked_step and step % self._options.check_interval == 0 and self._trains()

    def _checked(self, region: Region, batch: EncoderBatch) -> tuple[Tensor, ...] | None:
        """Replay a batch and compare it with eager."""
        options, step = self._options, self._manager.step_number
        tolerance = TOLERANCES[self._family.direct_attention.rounds_as_eager]
        check = ReplayCheck(self._run, self._manager.undone, tolerance, options.strict, self.checks)
        check.start(step, batch)
        outputs = region.run(batch, check)
        if outputs is not None:
            self._checked_step = step
            check.compare_outputs(outputs, region.sources.current)
        return outputs

    def _run(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        return self._adapter.outputs(self._adapter.run(self._manager.eager_forward, batch))


def measured_costs(
    model: nn.Module, device: torch.device, options: VisionGraphOptions, clock: Clock | None
) -> MeasuredCosts | None:
    """Return where an encoder's microbatches are timed, or None where times must not decide.

    Deterministic runs must repeat themselves, and tensor-parallel ranks must decide alike, as their collectives
    depend on it; times do neither.
    """
    if not options.cost_fallback or deterministic():
        return None
    config: Any = getattr(model, "config", None)
    if (getattr(config, "tensor_model_parallel_size", None) or 1) > 1:
        return None
    if clock is None and device.type == "cuda":
        clock = CudaClock()
    return MeasuredCosts(clock) if clock is not None else None
