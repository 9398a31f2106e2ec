"""A region's recordings: what a capture makes, and what microbatches ask for later."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from ...announce import warn
from ..changes.source import TRIED_AGAIN, Recorded, Source
from ..changes.sources import LASTING
from ..errors import CaptureError, OtherRankFailed, named, reason_of
from ..fallback import Fallback
from ..piece import SINGLE_RANK, Surroundings
from ..planning.buckets import Bucket
from ..rank_consensus import SingleRank
from ..replays.pending import NO_BACKWARD
from ..replays.slot import Slot
from ..retries import Retry
from .capture import is_capturing
from .chain import Chain
from .executor import give_back_after
from .part import Part
from .recording import EVALUATION, Mode

# A recording of a region: the slot's number, bucket and mode.
Wish = tuple[int, Bucket, Mode]

FAILED_HERE = "had to be recaptured because memory was moved on this rank, and could not be captured"


class Recordings(Part):
    """The slots and recordings of a region, from one capture to the next.

    Args:
        chain: What it is recorded with.
        around: What is around the model in this run.
        strict: Whether a recording that fails raises.
        of_part: Further arguments of `Part`.

    Attributes:
        wishes: What training steps missed, oldest first, with the number of the source that it is to be recorded from.
    """

    def __init__(self, chain: Chain, around: Surroundings, strict: bool, **of_part: Any) -> None:
        super().__init__(**of_part)
        self._chain, self._strict = chain, strict
        self._consensus, self._before_replay = around.consensus, around.before_replay
        self.wishes: dict[Wish, int] = {}
        self._forward_slot_failed = Retry(TRIED_AGAIN)
        self._asked: Counter[Hashable] = Counter()
        chain.join(self)

    def leave(self) -> None:
        """Let go of the chain: both would hold each other's memory until a collection."""
        self.slots = []
        self._chain.leave(self)

    def add_slots(self, count: int, buckets: Sequence[Bucket]) -> None:
        """Make slots with static inputs for some buckets."""
        for index in range(count):
            self.slots.append(self.new_slot(index, self._chain.common(index), buckets))

    def find(
        self, source: Source, bucket: Bucket, mode: Mode, index: int | None, records: bool
    ) -> tuple[Slot, Recorded] | Fallback:
        """Return a free slot with the recording, made now if it is missing, or why there is none.

        Args:
            source: What the model is.
            bucket: The bucket.
            mode: The mode.
            index: The slot to use; None is the first free one.
            records: Whether a missing recording may be made.

        Raises:
            CaptureError: A recording failed, and the region is strict.
        """
        try:
            slot = self._free_slot(source, bucket, mode, index)
        except Exception as error:  # no memory for one more slot
            self.forward_slot = None
            self._forward_slot_failed.failed()
            return self._failed(source, bucket, mode, error)
        if slot is None:
            return Fallback.NO_FREE_SLOT
        wish = slot.index, bucket, mode
        if wish not in source.recordings:
            reason = self._record_missing(source, slot, wish, records)
            if reason is not None:
                return reason
        return slot, source.recordings[wish]

    def recorded(self, source: Source, bucket: Bucket, mode: Mode) -> tuple[Slot, Recorded] | None:
        """Return a recording in a free slot, None without one."""
        for slot in self.slots:
            if slot.free and (slot.index, bucket, mode) in source.recordings:
                return slot, source.recordings[slot.index, bucket, mode]
        return None

    def _free_slot(self, source: Source, bucket: Bucket, mode: Mode, index: int | None) -> Slot | None:
        """Return a slot that no microbatch holds, one with the recording where there is one."""
        if index is None and not mode.gradients:
            return self.slots[0] if self.slots[0].free else self._forward_only_slot(self._is_lasting(source))
        first = None
        for slot in self.slots if index is None else self.slots[index : index + 1]:
            if slot.lease is None:
                if (slot.index, bucket, mode) in source.recordings:
                    return slot
                first = first or slot
        return first

    def _forward_only_slot(self, lasting: bool) -> Slot | None:
        """Return a slot for passes without a backward while another microbatch holds the first one.

        It is made once such passes come again: a reference pass between a policy's forward and its backward.
        """
        self._forward_slot_failed.turn()
        missing = self.forward_slot is None and self._forward_slot_failed.due
        if missing and (lasting or self._asked_before("forward-only slot")):
            self._consensus.agree(self._add_forward_only_slot)
        return self.forward_slot

    def _add_forward_only_slot(self) -> float:
        index = len(self.slots)
        self.forward_slot = self.new_slot(index, self._chain.common(index), list(self.slots[0].buffers))
        return 0.0

    def _record_missing(self, source: Source, slot: Slot, wish: Wish, records: bool) -> Fallback | None:
        """Record what a batch asks for; returns why it cannot be or is not yet."""
        _, bucket, mode = wish
        source.failed.ask((bucket, mode))
        # What others have, as in another slot or before, is tried on.
        others_have_it = wish in source.recorded_by_other_ranks
        if not others_have_it and (failed := source.failed.reason((bucket, mode))) is not None:
            return failed
        at_once = others_have_it or self._is_lasting(source)
        if self._piece.growth and not at_once and (mode.gradients or mode.training is not False):
            self.wishes[wish] = source.number  # between two steps: other ranks wait for one recording a step
            return Fallback.NOT_CAPTURED_YET
        if not records:
            return Fallback.NOT_CAPTURED_YET
        evaluates = mode == EVALUATION and slot is not self.forward_slot
        if not (evaluates or at_once) and not self._asked_before((mode, slot is self.forward_slot)):
            return Fallback.MODE_NOT_CAPTURED
        if torch._C._current_graph_task_id() != NO_BACKWARD or is_capturing():
            return Fallback.NOT_CAPTURED_YET
        if mode.gradients and not self._chain.is_free(slot.index):
            return Fallback.NO_FREE_SLOT
        if self._before_replay is not None:
            self._before_replay()
        only_here = others_have_it and not isinstance(self._consensus, SingleRank)
        try:
            record = partial(self.add, source, slot.index, bucket, mode, only_here)
            (SINGLE_RANK if only_here else self._consensus).agree(record)
        except Exception as error:
            if only_here:  # the others replay it now
                raise CaptureError(f"{self.name}: bucket {bucket} {FAILED_HERE}: {named(error)}") from error
            self._refuse(wish, error)
            return self._failed(source, bucket, mode, error)
        return None

    def add(self, source: Source, index: int, bucket: Bucket, mode: Mode, only_here: bool = False) -> float:
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
                    self._chain.record(index, [wish[1:]], part=self._chain.asking(self, mode), only_here=only_here)
                if wish not in source.recordings:
                    raise CaptureError(f"{self.name}: the model has changed again since a microbatch asked for it")
        finally:
            self._chain.tidy(self)
        return 0.0

    def _refuse(self, wish: Wish, error: Exception) -> None:
        """Forget what this rank recorded and another one could not."""
        self._chain.refuse(wish[0], [wish[1:]], error, self._chain.asking(self, wish[2]))

    def _is_lasting(self, source: Source) -> bool:
        """Whether the model was in this state before; ranks that must ask alike do not count memory that moved."""
        return source.lasting or (source.moved_here and isinstance(self._consensus, SingleRank))

    def _asked_before(self, what: Hashable) -> bool:
        self._asked[what] += 1
        return self._asked[what] >= LASTING

    def _failed(self, source: Source, bucket: Bucket, mode: Mode, error: Exception) -> Fallback:
        """Note that a bucket cannot be captured; returns the reason for running eager.

        Raises:
            CaptureError: The region is strict.
        """
        source.failed.note((bucket, mode), reason := reason_of(error))
        said = f"{self.name}: bucket {bucket} could not be captured"
        if self._strict:
            raise CaptureError(f"{said}: {named(error)}") from error
        if not isinstance(error, OtherRankFailed):  # the rank that failed reports it
            warn(f"{said}, it runs eager: {named(error)}")
        give_back_after(error, self._executor)
        return reason

    def record_wish(self, wish: Wish) -> None:
        """Record what a training step missed.

        Raises:
            CaptureError: It failed.
        """
        del self.wishes[wish]
        self.add(self.sources.current, *wish)

    def take_back(self, wish: Wish) -> None:
        """Forget what was recorded for a wish that not all ranks could record."""
        self.wishes.pop(wish, None)  # where the recording of an earlier part failed, this one's was not begun
        self._refuse(wish, CaptureError("not all ranks could record it"))
        self._chain.tidy(self)

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket with what was recorded for it, and give its memory back."""
        self._executor.tidy()  # last replays of it have ended by then
        for source in self.sources:
            source.recordings = {place: made for place, made in source.recordings.items() if place[1] != bucket}
            source.recorded_by_other_ranks = frozenset(p for p in source.recorded_by_other_ranks if p[1] != bucket)
        for slot in self.every_slot():
            slot.buffers.pop(bucket, None)
        self.wishes = {wish: number for wish, number in self.wishes.items() if wish[1] != bucket}
        self._executor.tidy()
        self._chain.tidy(self)
