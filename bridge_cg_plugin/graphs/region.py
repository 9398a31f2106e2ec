"""A region: a piece of a model that runs as a graph whenever it can, and says why when it cannot."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .activations import Offloading
from .errors import CaptureError, OutOfMemoryInCapture, first_line
from .executor import Executor
from .gradients import GradientSinks, Reduction
from .parameters import ParameterAliases
from .program import Bucket, RegionProgram
from .recording import TRAINING, Mode, RegionBody
from .replay import BackwardObserver, replay
from .slot import SharedInputs, Slot
from .statistics import BucketStatistics, RegionStatistics


class Region:
    """Captures a program for several buckets and replays the first that accepts a batch.

    Args:
        program: The piece of the model.
        executor: Makes the recordings.
        buckets: What to record for. A batch takes the first that accepts it, so cheaper ones come first.
        slots: Microbatches that may be between their forward and their backward at once.
        evaluation: Also record a forward-only graph for evaluation.
        before_replay: Called before each replay; waits for parameters that are gathered while training runs.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        shared: Static inputs that it has in common with other regions.
        offloading: Decides where activations are between forward and backward; None keeps them in the graphs' memory.
        has_side_work: Whether a bucket's recordings have a side stream; see `SideWork`.

    Attributes:
        aliases: Stand-ins for the region's parameters, once captured.
        sinks: Where parameter gradients go, once captured.

    Raises:
        ValueError: No bucket, a bucket or `slots` below 1.
    """

    def __init__(
        self,
        program: RegionProgram,
        executor: Executor,
        buckets: Sequence[Bucket],
        slots: int = 1,
        evaluation: bool = True,
        before_replay: Callable[[], None] | None = None,
        reduction: Reduction | None = None,
        shared: SharedInputs | None = None,
        offloading: Offloading | None = None,
        has_side_work: Callable[[Bucket], bool] = lambda bucket: False,
    ) -> None:
        if not buckets or min(buckets).tokens < 1:
            raise ValueError(f"a region needs buckets of at least 1 token, got {[str(b) for b in buckets]}")
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.program = program
        self.executor = executor
        self.buckets = tuple(dict.fromkeys(buckets))
        self.slot_count = slots
        self.evaluation = evaluation
        self.statistics = RegionStatistics()
        self._before_replay = before_replay
        self._reduction, self._shared = reduction, shared
        self._offloading, self._has_side_work = offloading, has_side_work
        self._slots: list[Slot] = []
        self._recorded: set[Mode] = set()
        self._looks_once = self._looked = False
        self.aliases: ParameterAliases | None = None
        self.sinks: GradientSinks | None = None

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
        self.aliases = ParameterAliases(self.program.modules())
        self.sinks = GradientSinks(self.aliases.trainable, self._reduction)
        self.statistics.buckets = {bucket: BucketStatistics() for bucket in self.buckets}
        slots: list[Slot] = []
        try:
            for index in range(self.slot_count):
                slots.append(self._accepted_slot(index))
        except BaseException as error:
            slots.clear()
            self.reset()
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemoryInCapture(first_line(error)) from error
            raise
        self._slots = slots
        self._recorded = {mode for _, mode in slots[0].recordings}
        self.sinks.watch()
        self.statistics.static_bytes = sum(slot.arena.nbytes for slot in slots)
        self.statistics.pinned_bytes = 0 if self._offloading is None else self._offloading.pinned_bytes
        self.statistics.capture_seconds += time.perf_counter() - started

    def _accepted_slot(self, index: int) -> Slot:
        """Record a slot, again for as long as its activations take more memory than they may.

        What a pool loses between its blocks is known only once all buckets share it.
        """
        while True:
            slot = Slot(index, self.executor.device, self.executor.new_pool(), self._shared)
            taken = self._record_slot(slot)
            total = self.executor.pool_bytes(slot.pool) + slot.arena.nbytes
            if self._offloading is None or self._offloading.accepts(total):
                for bucket, nbytes in taken.items():
                    self.statistics.buckets[bucket].memory += nbytes
                return slot
            del slot

    def _record_slot(self, slot: Slot) -> dict[Bucket, int]:
        """Record every bucket; returns the bytes by which each made the slot's pool grow."""
        forward_only = self._forward_only_buckets() if slot.index == 0 else ()
        taken = {}
        for bucket in sorted(self.buckets, reverse=True):
            before = self.executor.pool_bytes(slot.pool)
            specs = self.program.input_specs(bucket)
            slot.buffers[bucket] = slot.input_buffers(specs)
            self.program.load_example(slot.buffers[bucket], bucket)
            for mode in self._modes(bucket in forward_only):
                self._record(slot, bucket, mode)
            taken[bucket] = self.executor.pool_bytes(slot.pool) - before
        return taken

    def _modes(self, evaluation: bool) -> Iterator[Mode]:
        """What to record for a bucket; a region that trains nothing is replayed without gradients in training, too."""
        training = self._in_training()
        frozen = not self.sinks.parameters
        if not frozen or self._differentiable():
            yield Mode(gradients=True, training=training)
        if frozen and training:
            yield Mode(gradients=False, training=True)
        if evaluation or (frozen and not training):
            yield Mode(gradients=False, training=False)

    def _in_training(self) -> bool:
        return self.program.modules()[0].training

    def _differentiable(self) -> bool:
        return any(spec.differentiable for spec in self.program.input_specs(self.buckets[0]).values())

    def _forward_only_buckets(self) -> set[Bucket]:
        """The buckets that no other of the same capacity contains: limits cost a forward little."""
        if not self.evaluation:
            return set()
        return {b for b in self.buckets if not any(other.contains(b) for other in self.buckets if other != b)}

    def _record(self, slot: Slot, bucket: Bucket, mode: Mode) -> None:
        sinks = self.sinks if mode.gradients else None
        switched = None if mode.training == self._in_training() else mode.training
        side = self.executor.side_work() if self._has_side_work(bucket) else None
        body = RegionBody(self.program, slot.buffers[bucket], bucket, self.aliases, sinks, switched, side)

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            views = tuple(
                slot.arena.view(f"output_gradient:{i}", tuple(o.shape), o.dtype).zero_() for i, o in enumerate(outputs)
            )
            slot.output_gradients[bucket] = views
            return views

        try:
            self.executor.warm_up(body, output_gradients)
            if self._offloading is not None and mode.gradients:
                body.activations = self._offloading.prepare(self.executor, body, slot.index)
            slot.recordings[bucket, mode] = self.executor.record(body, slot.pool)
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__} in bucket {bucket}: {error}") from error

    def reset(self) -> None:
        """Drop all recordings and their memory."""
        if self.sinks is not None:
            self.sinks.release()
        self._slots = []
        self._looked = False
        self.aliases = self.sinks = None
        if self._offloading is not None:
            self._offloading.release()

    def choose(self, batch: Any, mode: Mode = TRAINING) -> tuple[Bucket, None] | tuple[None, str]:
        """Return the first bucket that accepts the batch, or the reason why none does."""
        if mode not in self._recorded:
            return None, "mode_not_captured" if mode.gradients or mode.training else "evaluation_not_captured"
        size, reason = self.program.size(batch), "too_many_tokens"
        for bucket in self.buckets:
            if size <= bucket.tokens and (bucket, mode) in self._slots[0].recordings:
                refusal = self.program.refuse(batch, bucket)
                if refusal is None:
                    return bucket, None
                reason = refusal
        return None, reason

    def run(
        self, batch: Any, observer: BackwardObserver | None = None, index: int | None = None
    ) -> tuple[Tensor, ...] | None:
        """Replay the batch; returns its real outputs, or None with the reason counted: then run it eager.

        Args:
            batch: The microbatch.
            observer: Watches its backward.
            index: The slot to use; None is the first free one.
        """
        place = self._place(batch, index)
        if isinstance(place, str):
            self.statistics.fallbacks[place] += 1
            return None
        slot, bucket, mode = place
        if self._before_replay is not None:
            self._before_replay()
        outputs = replay(self.program, self.sinks, slot, bucket, mode, batch, observer)
        self.statistics.replayed(bucket, self.program.size(batch), mode.gradients)
        return outputs

    def why_not(self, batch: Any, index: int | None = None) -> str | None:
        """Return why a batch cannot be replayed now, None if it can; nothing is counted.

        Args:
            batch: The microbatch.
            index: The slot that it must use; None is any.
        """
        place = self._place(batch, index)
        return place if isinstance(place, str) else None

    def is_free(self, index: int) -> bool:
        """Whether no microbatch holds the slot with this number."""
        return self._slots[index].free

    def _place(self, batch: Any, index: int | None) -> tuple[Slot, Bucket, Mode] | str:
        """Return where the batch is replayed, or why it cannot be."""
        if not self.captured:
            return "not_captured"
        self.sinks.clear()
        mode = Mode(torch.is_grad_enabled() and self._wants_gradients(batch), self._in_training())
        bucket, reason = self.choose(batch, mode)
        if bucket is None:
            return reason
        slot = self._free_slot(bucket, mode, index)
        if slot is None:
            return "no_free_slot"
        if self._parameters_changed():
            return "parameters_changed"
        return slot, bucket, mode

    @contextmanager
    def parameters_kept(self) -> Iterator[None]:
        """Inside, as in a training step, parameters stay where the first replay finds them: only that one looks."""
        self._looks_once = True
        try:
            yield
        finally:
            self._looks_once = self._looked = False

    def _parameters_changed(self) -> bool:
        if self._looked:
            return False
        changed = self.aliases.moved() or self.sinks.moved()
        self._looked = self._looks_once and not changed
        return changed

    def _wants_gradients(self, batch: Any) -> bool:
        return bool(self.sinks.parameters) or any(t.requires_grad for t in self.program.differentiable_inputs(batch))

    def _free_slot(self, bucket: Bucket, mode: Mode, index: int | None) -> Slot | None:
        slots = self._slots if index is None else self._slots[index : index + 1]
        return next((s for s in slots if s.free and (bucket, mode) in s.recordings), None)

    def free_slots(self) -> int:
        """Return how many slots no microbatch holds."""
        return sum(slot.free for slot in self._slots)
