"""A region: a piece of a model that runs as a graph whenever it can, and says why when it cannot."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .executor import Executor
from .gradients import GradientSinks
from .parameters import ParameterAliases
from .program import RegionProgram
from .recording import RegionBody
from .replay import BackwardObserver, replay
from .slot import Slot
from .statistics import BucketStatistics, RegionStatistics


class Region:
    """Captures a program at several capacities and replays the smallest that holds a batch.

    Args:
        program: The piece of the model.
        executor: Makes the recordings.
        capacities: Tokens each bucket holds.
        slots: Microbatches that may be between their forward and their backward at once.
        evaluation: Also record a forward-only graph for evaluation.
        before_replay: Called before each replay; waits for parameters that are gathered while training runs.

    Raises:
        ValueError: No capacity, a capacity or `slots` below 1.
    """

    def __init__(
        self,
        program: RegionProgram,
        executor: Executor,
        capacities: Sequence[int],
        slots: int = 1,
        evaluation: bool = True,
        before_replay: Callable[[], None] | None = None,
    ) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"capacities must be positive and at least one, got {list(capacities)}")
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.program = program
        self.executor = executor
        self.capacities = tuple(sorted(set(capacities)))
        self.slot_count = slots
        self.evaluation = evaluation
        self.statistics = RegionStatistics()
        self._before_replay = before_replay
        self._slots: list[Slot] = []
        self._aliases: ParameterAliases | None = None
        self._sinks: GradientSinks | None = None

    @property
    def captured(self) -> bool:
        """Whether recordings exist."""
        return bool(self._slots)

    def capture(self) -> None:
        """Record every bucket in every slot, largest first.

        Raises:
            CaptureError: Recording failed; nothing of it is kept and the process can go on.
        """
        started = time.perf_counter()
        self.reset()
        self._aliases = ParameterAliases(self.program.modules())
        self._sinks = GradientSinks(self._aliases.trainable)
        self.statistics.buckets = {c: BucketStatistics() for c in self.capacities}
        slots: list[Slot] = []
        try:
            for index in range(self.slot_count):
                slots.append(Slot(index, self.executor.device, self.executor.new_pool()))
                self._record_slot(slots[-1])
        except BaseException:
            slots.clear()
            self._aliases = self._sinks = None
            raise
        self._slots = slots
        self.statistics.static_bytes = sum(slot.arena.nbytes for slot in slots)
        self.statistics.capture_seconds += time.perf_counter() - started

    def _record_slot(self, slot: Slot) -> None:
        for capacity in reversed(self.capacities):
            before = self.executor.pool_bytes(slot.pool)
            specs = self.program.input_specs(capacity)
            slot.buffers[capacity] = slot.arena.buffers(specs)
            self.program.load_example(slot.buffers[capacity], capacity)
            differentiable = any(spec.differentiable for spec in specs.values())
            if self._sinks.parameters or differentiable:
                self._record(slot, capacity, training=True)
            if not self._sinks.parameters or (self.evaluation and slot.index == 0):
                self._record(slot, capacity, training=False)
            self.statistics.buckets[capacity].memory += self.executor.pool_bytes(slot.pool) - before

    def _record(self, slot: Slot, capacity: int, training: bool) -> None:
        sinks = self._sinks if training else None
        body = RegionBody(self.program, slot.buffers[capacity], capacity, self._aliases, sinks)

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            views = tuple(
                slot.arena.view(f"output_gradient:{i}", tuple(o.shape), o.dtype).zero_() for i, o in enumerate(outputs)
            )
            slot.output_gradients[capacity] = views
            return views

        self.executor.warm_up(body, output_gradients)
        slot.recordings[capacity, training] = self.executor.record(body, slot.pool)

    def reset(self) -> None:
        """Drop all recordings and their memory."""
        self._slots = []
        self._aliases = self._sinks = None

    def choose(self, batch: Any) -> tuple[int, None] | tuple[None, str]:
        """Return the capacity of the smallest bucket that holds the batch, or the reason why none does."""
        size, reason = self.program.size(batch), None
        for capacity in self.capacities:
            if size <= capacity:
                reason = self.program.refuse(batch, capacity)
                if reason is None:
                    return capacity, None
        return None, reason or "too_many_tokens"

    def run(self, batch: Any, observer: BackwardObserver | None = None) -> tuple[Tensor, ...] | None:
        """Replay the batch; returns its real outputs, or None with the reason counted: then run it eager."""
        if not self.captured:
            return self._fall_back("not_captured")
        capacity, reason = self.choose(batch)
        if capacity is None:
            return self._fall_back(reason)
        training = torch.is_grad_enabled() and self._wants_gradients(batch)
        slot = self._free_slot(capacity, training)
        if slot is None:
            return self._fall_back("no_free_slot" if training or self.evaluation else "evaluation_not_captured")
        if self._aliases.moved() or self._sinks.moved():
            return self._fall_back("parameters_changed")
        if self._before_replay is not None:
            self._before_replay()
        outputs = replay(self.program, self._sinks, slot, capacity, training, batch, observer)
        self.statistics.replayed(capacity, self.program.size(batch), training)
        return outputs

    def _wants_gradients(self, batch: Any) -> bool:
        return bool(self._sinks.parameters) or any(t.requires_grad for t in self.program.differentiable_inputs(batch))

    def _free_slot(self, capacity: int, training: bool) -> Slot | None:
        return next((s for s in self._slots if s.free and (capacity, training) in s.recordings), None)

    def _fall_back(self, reason: str) -> None:
        self.statistics.fallbacks[reason] += 1

    def watch_eager(self, outputs: Sequence[Tensor]) -> None:
        """Tell the engine that these outputs come from an eager pass over the region's parameters."""
        if self._sinks is not None and torch.is_grad_enabled():
            self._sinks.watch_eager(outputs)

    @property
    def sinks(self) -> GradientSinks | None:
        """Where parameter gradients go, once captured."""
        return self._sinks

    @property
    def aliases(self) -> ParameterAliases | None:
        """Stand-ins for the region's parameters, once captured."""
        return self._aliases

    def free_slots(self) -> int:
        """Return how many slots no microbatch holds."""
        return sum(slot.free for slot in self._slots)
