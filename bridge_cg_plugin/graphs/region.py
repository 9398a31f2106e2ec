"""A region: a piece of a model that runs as a graph whenever it can, and reports why when it cannot."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..announce import warn_once
from .buckets import Bucket, choose
from .changes.model_watch import ModelWatch
from .changes.source import TRIED_AGAIN, Source
from .changes.sources import LASTING, Sources
from .errors import CaptureError, Retry, named, reason_of
from .fallback import Fallback
from .program import SINGLE_RANK, Piece, RankConsensus, Surroundings
from .proofs.schedule import Proofs
from .recordings.capture import in_checkpoint, is_capturing
from .recordings.chain import Chain, Part
from .recordings.executor import give_up
from .recordings.recording import EVALUATION, TRAINING, Mode
from .replays.gradients import NO_BACKWARD
from .replays.replay import BackwardObserver, Replay
from .replays.slot import Slot
from .reports import BucketStatistics

LEAST = Bucket(1)
# A recording of a region: the slot's number, bucket and mode.
Wish = tuple[int, Bucket, Mode]


class Region(Part):
    """Captures a program for several buckets and replays the first that accepts a batch.

    A recording is replayed only while what it was made from holds (`Sources`). A model that changed runs eager; a state
    that lasts, or memory that was moved, gets recordings when the next batch asks for them.

    Args:
        piece: What is recorded. A batch takes the first bucket that accepts it, so cheaper ones come first. A piece
            that grows gets buckets from `add`.
        chain: What it is recorded with, and where activations are.
        surroundings: What is around the model in this run.
        watch: Follows the model that the program is a piece of.
        strict: Whether a recording that fails raises once graphs exist.

    Attributes:
        proofs: What compares a replay of this step with eager; None where none is due.

    Raises:
        ValueError: No bucket of a piece that does not grow, a bucket or `slots` below 1.
    """

    def __init__(
        self, piece: Piece, chain: Chain, surroundings: Surroundings, watch: ModelWatch, strict: bool = False
    ) -> None:
        self._around = surroundings
        if min(piece.buckets, default=LEAST).tokens < 1 or not (piece.buckets or piece.growth):
            raise ValueError(f"a region needs buckets of at least 1 token, got {[str(b) for b in piece.buckets]}")
        if self._around.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self._around.slots}")
        super().__init__(piece, chain.executor, watch)
        self.chain = chain
        self.slot_count = self._around.slots
        self._consensus, self._strict = self._around.consensus, strict
        self._warned: set[str] = set()
        self.proofs: Proofs | None = None
        self.reset()

    @property
    def readiness(self) -> tuple[int, list[int]]:
        """Which recorded state the model is in, 0 for none, and the slots that microbatches hold."""
        state = self.sources.recorded_state(torch.is_grad_enabled()) if self.slots else 0
        return state, [slot.index for slot in self.slots if not slot.free]

    def prepare(self) -> None:
        """Plan what the region's chain records behind what its other parts plan, and make slots for it.

        Raises:
            CaptureError: The model cannot be recorded as it is, or there is no memory for static inputs.
        """
        self.reset()
        self.statistics.buckets = {bucket: BucketStatistics() for bucket in self.buckets}
        executor, chain = self.executor, self.chain
        self.sources = Sources(self.program, self.watch, executor.device, self._around.reduction, executor.home())
        self.planned = [self._planned(index) for index in range(self.slot_count)]
        chain.parts.append(self)
        self.slots = [self._new_slot(index) for index in range(self.slot_count)]
        self.add_inputs(self.buckets)
        chain.count(self)

    def _new_slot(self, index: int) -> Slot:
        executor = self.executor
        return Slot(index, executor.device, self.chain.common(index), self._piece.shared, executor.static_memory)

    def add(self, bucket: Bucket, record: bool) -> None:
        """Let batches use one more bucket of a piece that grows.

        Args:
            bucket: The bucket.
            record: Whether to record it now, as training steps ask for it. Else it is for passes without a backward,
                which record it when they ask for it, until it is added for training, too.

        Raises:
            CaptureError: It could not be recorded; `drop` it then.
        """
        self.add_inputs([bucket])
        source = self.source() if record and not self.disproved else None
        if isinstance(source, Source):
            for index in range(self.slot_count):
                self.record(source, index, bucket, self._training_mode(bucket))
        self.buckets = self._ordered(dict.fromkeys((*self.buckets, bucket)))

    def begin_step(self, proofs: Proofs) -> None:
        """Note that a step or an evaluation begins, some of whose replays may be compared with eager."""
        if self.disproved and self.is_idle():
            for bucket in self.buckets:
                self.drop(bucket)
        self.proofs = proofs if proofs.may_be_due(self) else None

    @property
    def unproven(self) -> list[Bucket]:
        """The bucket of each recording that was not compared with eager."""
        return [bucket for source in self.sources for _, bucket, _ in source.unproven]

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket with what was recorded: it could not be recorded, or its memory is wanted for others."""
        self.buckets = tuple(each for each in self.buckets if each != bucket)
        self.executor.tidy()  # last replays of it have ended by then
        for source in self.sources:
            source.recordings = {place: made for place, made in source.recordings.items() if place[1] != bucket}
            source.unproven.difference_update([place for place in source.unproven if place[1] == bucket])
            source.recorded_by_other_ranks = frozenset(p for p in source.recorded_by_other_ranks if p[1] != bucket)
        for slot in self.slots:
            slot.buffers.pop(bucket, None)
        self.executor.tidy()
        self.chain.tidy(self)

    def reset(self) -> None:
        """Drop all recordings and their memory."""
        self.slots = []
        self.chain.leave(self)  # both would hold each other's memory until a collection
        if (sources := vars(self).pop("sources", None)) is not None:
            sources.release()
        self._asked: Counter[Hashable] = Counter()
        self._forward_slot_failed = Retry(TRIED_AGAIN)

    def run(self, batch: Any, observer: BackwardObserver | None = None) -> tuple[Tensor, ...] | None:
        """Replay the batch; returns its real outputs, or None with the reason counted: then run it eager.

        Args:
            batch: The microbatch.
            observer: Watches its backward.

        Raises:
            CaptureError: A recording that the batch asked for failed, and the region is strict.
        """
        decision = self.decide(batch)
        if isinstance(decision, Fallback):
            self.fell_back(decision, batch)
            return None
        if self._around.before_replay is not None:
            self._around.before_replay()
        if self.proofs is not None:
            return self.compared(self.proofs, decision, batch, observer)
        return decision.run(batch, observer)

    def compared(
        self, proofs: Proofs, decided: Replay, batch: Any, observer: BackwardObserver | None = None
    ) -> tuple[Tensor, ...] | None:
        """Replay the batch, compared with eager where that is due; returns None where it is to run eager, counted."""
        outputs = proofs.run(self, self._piece, decided, batch, observer)
        if outputs is None:
            self.fell_back(Fallback.DIFFERS_FROM_EAGER, batch)
        return outputs

    def fell_back(self, reason: Fallback, batch: Any) -> None:
        """Count a batch that runs eager."""
        self.statistics.fell_back(self.name, reason, self.program.size(batch))

    def choose(self, batch: Any, mode: Mode = TRAINING) -> Bucket | Fallback:
        """Return the first bucket that accepts the batch, or the reason why none does."""
        evaluated = () if self._growth is None else self._growth.evaluated
        trained = [bucket for bucket in self.buckets if bucket not in evaluated]
        buckets = trained if mode.gradients else self._forward_only_buckets()
        found = choose(self.program.size(batch), buckets, partial(self.program.refuse, batch))
        if isinstance(found, Bucket) or self._growth is None:
            return found
        return self._growth.missed(self._piece.shape(batch))

    def decide(self, batch: Any, index: int | None = None, records: bool = True) -> Replay | Fallback:
        """Return how a batch is replayed, or why it cannot be; nothing is counted.

        Args:
            batch: The microbatch.
            index: The slot that it must use; None is the first free one.
            records: Whether a missing recording is made.

        Raises:
            CaptureError: A recording that the batch asked for failed, and the region is strict.
        """
        if not self.slots:
            return Fallback.NOT_CAPTURED_YET
        if self.disproved:
            return Fallback.DIFFERS_FROM_EAGER
        sources = self.sources
        gradients = torch.is_grad_enabled()
        source = self.source(gradients, asks=records)
        if not isinstance(source, Source):
            return source
        mode = Mode(gradients and self._wants_gradients(source, batch), sources.training)
        if mode.gradients and in_checkpoint():
            return Fallback.IN_CHECKPOINT
        bucket = self.choose(batch, mode)
        if not isinstance(bucket, Bucket):
            return bucket
        slot = self._free_slot(source, bucket, mode, index)
        if not isinstance(slot, Slot):
            return slot
        wish = slot.index, bucket, mode
        if wish not in source.recordings and (failed := self._record_missing(source, wish, records)) is not None:
            return failed
        recorded, holds = source.recordings[wish], partial(sources.holds, sources.turn)
        return Replay(self.program, source, recorded, slot, bucket, mode.gradients, holds, self.statistics)

    def still_holds(self, decided: Replay, batch: Any) -> bool:
        """Whether a batch of the decided shape, which comes a moment later, is replayed as was decided."""
        gradients = torch.is_grad_enabled() and self._wants_gradients(decided.source, batch)
        kind = self.executor.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (
            decided.slot.free
            and decided.recorded is decided.source.recordings.get(decided.recorded.place)
            and gradients == decided.gradients
            and autocast == decided.source.numerics.autocast
            and not (gradients and in_checkpoint())
        )

    def source(self, gradients: bool = True, asks: bool = True) -> Source | Fallback:
        """See `Part`."""
        try:
            source = self.sources.find(gradients, self.is_idle, asks)
        except Exception as error:
            # What the model is, all ranks find alike; what happens to this rank's memory, this one alone.
            if self._strict or not (self._alone or isinstance(error, CaptureError)):
                raise CaptureError(f"{self.name}: {named(error)}") from error
            warn_once(f"{self.name} cannot be captured as it is now, it runs eager: {named(error)}", self._warned)
            return reason_of(error)
        if source is Fallback.MEMORY_MOVED and not self._alone:
            raise CaptureError(
                f"{self.name}: memory of parameters or of their main_grad was moved while a microbatch is "
                "between its forward and its backward. Ranks that share these layers cannot know; move it between steps"
            )
        return source

    @property
    def _alone(self) -> bool:
        """Whether no other rank stays with this one."""
        return self._consensus is SINGLE_RANK

    def _wants_gradients(self, source: Source, batch: Any) -> bool:
        return bool(source.sinks.parameters) or any(t.requires_grad for t in self.program.differentiable_inputs(batch))

    def is_idle(self) -> bool:
        """Whether no microbatch is between its forward and its backward."""
        return all(slot.free for slot in self.slots)

    def _free_slot(self, source: Source, bucket: Bucket, mode: Mode, index: int | None) -> Slot | Fallback:
        """Return a slot that no microbatch holds, one with the recording where there is one, or why there is none."""
        first = None
        for slot in self.slots[: self.slot_count] if index is None else self.slots[index : index + 1]:
            if slot.free:
                wish = slot.index, bucket, mode
                # A rank whose memory moved has lost recordings: it makes them again where others replay theirs.
                if wish in source.recordings or wish in source.recorded_by_other_ranks:
                    return slot
                first = first or slot
        if first is None and index is None and not mode.gradients:
            return self._forward_only_slot(source, bucket, mode)
        return first or Fallback.NO_FREE_SLOT

    def _forward_only_slot(self, source: Source, bucket: Bucket, mode: Mode) -> Slot | Fallback:
        """Return a slot for passes without a backward while microbatches hold all others, or why there is none.

        It is made once such passes come again: a reference pass between a policy's forward and its backward, as of DPO.
        """
        self._forward_slot_failed.turn()
        missing = len(self.slots) == self.slot_count and self._forward_slot_failed.due
        if missing and (source.lasting or self._asked_before("forward-only slot")):
            try:
                self._consensus.agree(self._add_forward_only_slot)
            except Exception as error:  # no memory for one more
                del self.slots[self.slot_count :]
                self._forward_slot_failed.failed()
                return self._failed(source, bucket, mode, error)
        return next((slot for slot in self.slots[self.slot_count :] if slot.free), Fallback.NO_FREE_SLOT)

    def _add_forward_only_slot(self) -> None:
        self.slots.append(self._new_slot(self.slot_count))
        self.add_inputs(self.slots[0].buffers)

    def _record_missing(self, source: Source, wish: Wish, records: bool) -> Fallback | None:
        """Record what a batch asks for; returns why it cannot be or is not yet."""
        index, bucket, mode = wish
        if (failed := source.failed.get((bucket, mode))) is not None:
            failed.turn()
        # What others have, as in another slot or before, is tried on.
        others_have_it = wish in source.recorded_by_other_ranks
        if not (others_have_it or failed is None or failed.due):
            return failed.reason
        # Ranks that must ask alike do not count memory that moved.
        at_once = others_have_it or source.lasting or (source.moved_here and self._alone)
        if not records:
            return Fallback.NOT_CAPTURED_YET
        if not (mode == EVALUATION or at_once) and not self._asked_before(mode):
            return Fallback.MODE_NOT_CAPTURED
        if torch._C._current_graph_task_id() != NO_BACKWARD or is_capturing():
            return Fallback.NOT_CAPTURED_YET
        if mode.gradients and not self.chain.is_free(index):
            return Fallback.NO_FREE_SLOT
        if self._around.before_replay is not None:
            self._around.before_replay()
        only_here = others_have_it and not self._alone
        try:
            record = partial(self.record, source, *wish, only_here)
            (SINGLE_RANK if only_here else self._consensus).agree(record)
        except Exception as error:
            if only_here:  # the others replay it now
                raise CaptureError(
                    f"{self.name}: bucket {bucket} had to be recaptured because memory was moved on this rank, and "
                    f"could not be captured: {named(error)}"
                ) from error
            # What this rank recorded and another one could not is forgotten.
            self.chain.refuse(index, [wish[1:]], error, self.chain.asking(self, mode))
            return self._failed(source, bucket, mode, error)
        return None

    def record(self, source: Source, index: int, bucket: Bucket, mode: Mode, only_here: bool = False) -> None:
        """Record what is missing in a slot.

        Args:
            source: What the model is.
            index: Number of the slot.
            bucket, mode: What to record.
            only_here: Whether other ranks keep what they have.

        Raises:
            CaptureError: It failed.
        """
        wish = index, bucket, mode
        try:
            with self.statistics.recording():
                if wish not in source.recordings:
                    self.chain.record(index, [wish[1:]], self.chain.asking(self, mode), only_here)
                if wish not in source.recordings:
                    raise CaptureError(f"{self.name}: the model has changed again since a microbatch asked for it")
        finally:
            self.chain.tidy(self)

    def _asked_before(self, what: Hashable) -> bool:
        self._asked[what] += 1
        return self._asked[what] >= LASTING

    def _failed(self, source: Source, bucket: Bucket, mode: Mode, error: Exception) -> Fallback:
        """Note that a bucket cannot be captured; returns the reason for running eager.

        Raises:
            CaptureError: The region is strict.
        """
        source.refuse((bucket, mode), reason := reason_of(error))
        give_up(error, f"{self.name}: bucket {bucket}", "it runs eager", self._strict, self.executor)
        return reason


def all_idle(regions: Sequence[Region], consensus: RankConsensus) -> bool:
    """Whether no microbatch is between its forward and its backward, on any rank that is asked together."""
    return bool(consensus.agree(lambda: float(all(region.is_idle() for region in regions))).smallest)
