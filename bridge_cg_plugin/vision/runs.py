"""How an encoder's microbatch runs: replayed, timed or compared with eager, or eager where that is the faster."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention_bounds import deterministic
from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.region import Region
from ..graphs.workload import Call, Eager, Manager
from ..options import VisionGraphOptions
from .adapter import EncoderAdapter, EncoderBatch, EncoderFamily
from .check import CheckResult, ReplayCheck
from .eager_costs import Clock, CudaClock, MeasuredCosts, remember, watch_backward
from .shape import Shape


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
        stop = options.check_action == "stop"
        check = ReplayCheck(self._run, self._manager.undone, options.check_tolerance, stop, self.checks)
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
    depend on it; times do neither. Layers' parts are too short to time one by one.
    """
    if not options.cost_fallback or not options.whole_encoder or deterministic():
        return None
    config: Any = getattr(model, "config", None)
    if (getattr(config, "tensor_model_parallel_size", None) or 1) > 1:
        return None
    if clock is None and device.type == "cuda":
        clock = CudaClock()
    return MeasuredCosts(clock) if clock is not None else None
