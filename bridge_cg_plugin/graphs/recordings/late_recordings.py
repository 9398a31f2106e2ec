"""Recordings that microbatches ask for once graphs exist: of a bucket, a mode or a state of the model that has none."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...announce import warn
from ..changes.source import TRIED_AGAIN, Recorded, Source
from ..changes.sources import LASTING, Sources
from ..errors import CaptureError, OtherRankFailed, named, reason_of
from ..fallback import Fallback
from ..piece import SINGLE_RANK
from ..planning.buckets import Bucket
from ..rank_consensus import RankConsensus, SingleRank
from ..replays.gradients import static_bytes_of
from ..replays.pending import NO_BACKWARD
from ..replays.slot import Slot
from ..reports.statistics import RegionStatistics
from ..retries import Retry
from .capture import is_capturing
from .executor import give_back_after
from .recorder import Recorder
from .recording import EVALUATION, Mode

# A recording of a region: the slot's number, bucket and mode.
Wish = tuple[int, Bucket, Mode]

FAILED_HERE = "had to be recaptured because memory was moved on this rank, and could not be captured"


class LateRecordings:
    """Finds a free slot with a recording, and makes what is missing. It lives as long as one capture of a region.

    Args:
        recorder: Makes slots and recordings.
        sources: What recordings were made from.
        slots: The region's, all made.
        statistics: Of the region; memory and time are counted there.
        consensus: Ranks that record together with this one or not at all.
        strict: Whether a recording that fails raises.
        before_replay: Called before a recording, too, which reads parameters; see `Surroundings`.
        grows: Whether what training steps miss is recorded between steps.

    Attributes:
        forward_slot: For passes without a backward while another microbatch holds the first slot; None without one.
        wishes: What training steps missed, oldest first, with the number of the source that it is to be recorded from.
    """

    def __init__(
        self,
        recorder: Recorder,
        sources: Sources,
        slots: Sequence[Slot],
        statistics: RegionStatistics,
        consensus: RankConsensus,
        strict: bool,
        before_replay: Callable[[], None] | None,
        grows: bool = False,
    ) -> None:
        self._recorder, self._sources, self._slots = recorder, sources, slots
        self._statistics, self._grows = statistics, grows
        self.wishes: dict[Wish, int] = {}
        self._consensus, self._strict, self._before_replay = consensus, strict, before_replay
        self.forward_slot: Slot | None = None
        self._forward_slot_failed = Retry(TRIED_AGAIN)
        self._asked: Counter[Hashable] = Counter()

    def count_memory(self) -> None:
        """Note what slots, gradients and offloaded activations take now in the region's statistics."""
        statistics, offloading = self._statistics, self._recorder.offloading
        shared, pinned = self._shared_bytes()
        statistics.graph_bytes = sum(map(self._graph_bytes, self._every_slot()))
        statistics.static_bytes = shared + sum(slot.static.nbytes for slot in self._every_slot())
        statistics.gradient_bytes = static_bytes_of(source.sinks for source in self._sources)
        statistics.pinned_bytes = pinned if offloading is None else offloading.pinned_bytes

    def _graph_bytes(self, slot: Slot) -> int:
        """Return the device memory of a slot's recordings that the region counts."""
        return slot.memory.nbytes

    def _shared_bytes(self) -> tuple[int, int]:
        """Return what the region counts of memory that others use as well, on the device and page-locked."""
        return 0, 0

    def slot_bytes(self) -> int:
        """Return the device memory of the slot that takes most, in bytes."""
        shared = self._shared_bytes()[0] // max(len(self._slots), 1)
        taken = (self._graph_bytes(slot) + slot.static.nbytes for slot in self._every_slot())
        return shared + max(taken, default=0)

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
        recorded = source.recordings.get((slot.index, bucket, mode))
        wish = slot.index, bucket, mode
        if recorded is None:
            source.failed.ask((bucket, mode))
            failed = _failed_for(source, wish)
            if failed is None and self._awaits_a_step(source, wish):
                self.wishes[wish] = source.number
                return Fallback.NOT_CAPTURED_YET
            not_now = failed or Fallback.NOT_CAPTURED_YET
            may = records or self._may_always_record(slot, mode)
            refusal = self._record_now(source, slot, bucket, mode) if may else not_now
            if refusal is not None:
                return refusal
            recorded = source.recordings[wish]
        return slot, recorded

    def fill(
        self, source: Source, slot: Slot, places: Sequence[tuple[Bucket, Mode]], recorded: Callable[[], None]
    ) -> None:
        """Record in a new slot; see `Recorder.fill`."""
        self._recorder.fill(source, slot, places, self._trim, recorded)

    def leave(self) -> None:
        """Let go of what others hold of these recordings."""

    def _may_always_record(self, slot: Slot, mode: Mode) -> bool:
        """Whether recordings of a mode overwrite nothing that was loaded for other parts."""
        return False

    def _is_free(self, slot: Slot, mode: Mode) -> bool:
        """Whether recordings of a mode may be made in a slot that no microbatch holds here."""
        return True

    def _awaits_a_step(self, source: Source, wish: Wish) -> bool:
        """Whether what is missing is recorded between two steps, so that other ranks wait for one recording a step."""
        mode = wish[2]
        return self._grows and not self._at_once(source, wish) and (mode.gradients or mode.training is not False)

    def _at_once(self, source: Source, wish: Wish) -> bool:
        """Whether what is missing is recorded when it is first asked for."""
        return self._is_lasting(source) or wish in source.recorded_by_other_ranks

    def _is_lasting(self, source: Source) -> bool:
        """Whether the model was in this state before; ranks that must ask alike do not count memory that moved."""
        return source.lasting or (source.moved_here and isinstance(self._consensus, SingleRank))

    def recorded(self, source: Source, bucket: Bucket, mode: Mode) -> tuple[Slot, Recorded] | None:
        """Return a recording in a free slot, None without one."""
        for slot in self._slots:
            if slot.free and (slot.index, bucket, mode) in source.recordings:
                return slot, source.recordings[slot.index, bucket, mode]
        return None

    def record_wish(self, wish: Wish) -> None:
        """Record what a training step missed.

        Raises:
            CaptureError: It failed.
        """
        source, (index, bucket, mode) = self._sources.current, wish
        del self.wishes[wish]
        if wish in source.recordings:
            return
        try:
            self._add(source, self._every_slot()[index], bucket, mode)
        except CaptureError as error:
            source.failed.note((bucket, mode), reason_of(error))
            raise

    def take_back(self, source: Source, wish: Wish) -> None:
        """Forget what was recorded for a wish that not all ranks could record."""
        index, bucket, mode = wish
        self.wishes.pop(wish, None)  # where the recording of an earlier part failed, this one's was not begun
        error = CaptureError("not all ranks could record it")
        source.failed.note((bucket, mode), reason_of(error))
        self._take_back(source, self._every_slot()[index], bucket, mode, error)
        self._tidy()

    def add_inputs(self, bucket: Bucket) -> None:
        """Make one more bucket's static inputs in every slot.

        Raises:
            CaptureError: There is no memory for them.
        """
        for slot in self._every_slot():
            self._recorder.add_inputs(slot, bucket)

    def _every_slot(self) -> list[Slot]:
        return [*self._slots, *([] if self.forward_slot is None else [self.forward_slot])]

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket with what was recorded for it, and give its memory back."""
        self._forget(lambda place: place[1] == bucket)
        for slot in self._every_slot():
            slot.buffers.pop(bucket, None)
        self.wishes = {wish: number for wish, number in self.wishes.items() if wish[1] != bucket}
        self._recorder.executor.tidy()
        self._tidy()

    def _forget(self, which: Callable[[Wish], bool]) -> None:
        """Forget some recordings, as other ranks do; their last replays have ended by then."""
        self._recorder.executor.tidy()
        for source in self._sources:
            source.recordings = {place: made for place, made in source.recordings.items() if not which(place)}
            source.recorded_by_other_ranks = frozenset(p for p in source.recorded_by_other_ranks if not which(p))

    def _tidy(self) -> None:
        """Give back what no recording uses any more, and count the rest."""
        for slot in self._every_slot():
            slot.static.keep(self._used_in(slot))
            self._trim(slot)
        self.count_memory()

    def _trim(self, slot: Slot) -> None:
        """Give memory of recordings back that those which are left do without; a microbatch may hold a dropped one."""
        if slot.free:
            held = (source.recordings[place].nbytes for source in self._sources for place in source.in_slot(slot))
            slot.memory.keep(max(held, default=0))

    def _used_in(self, slot: Slot) -> Iterator[Tensor]:
        """Yield the static inputs and output gradients of what is recorded in a slot."""
        for buffers in slot.buffers.values():
            yield from buffers.values()
        for source in self._sources:
            for place in source.in_slot(slot):
                yield from source.recordings[place].output_gradients

    def record(self, source: Source, bucket: Bucket, mode: Mode) -> None:
        """Record one more bucket in the first slot.

        Raises:
            CaptureError: It failed; the slot's other recordings stay.
        """
        self._add(source, self._slots[0], bucket, mode)

    def _free_slot(self, source: Source, bucket: Bucket, mode: Mode, index: int | None) -> Slot | None:
        """Return a slot that no microbatch holds, one with the recording where there is one."""
        if index is None and not mode.gradients:
            return self._slots[0] if self._slots[0].free else self._forward_only_slot(self._is_lasting(source))
        free = [slot for slot in (self._slots if index is None else self._slots[index : index + 1]) if slot.free]
        for slot in free:
            if (slot.index, bucket, mode) in source.recordings:
                return slot
        return free[0] if free else None

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
        self.forward_slot = self._recorder.slot(len(self._slots), list(self._slots[0].buffers))
        return 0.0

    def _asked_before(self, what: Hashable) -> bool:
        self._asked[what] += 1
        return self._asked[what] >= LASTING

    def _record_now(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> Fallback | None:
        """Record what a batch asks for; returns why it cannot be or is not yet."""
        if (failed := _failed_for(source, (slot.index, bucket, mode))) is not None:
            return failed
        evaluates = mode == EVALUATION and slot is not self.forward_slot
        at_once = evaluates or self._at_once(source, (slot.index, bucket, mode))
        if not at_once and not self._asked_before((mode, slot is self.forward_slot)):
            return Fallback.MODE_NOT_CAPTURED
        if torch._C._current_graph_task_id() != NO_BACKWARD or is_capturing():
            return Fallback.NOT_CAPTURED_YET
        if not self._is_free(slot, mode):
            return Fallback.NO_FREE_SLOT
        if self._before_replay is not None:
            self._before_replay()
        others_have_it = (slot.index, bucket, mode) in source.recorded_by_other_ranks
        only_here = others_have_it and not isinstance(self._consensus, SingleRank)
        try:
            record = partial(self._add, source, slot, bucket, mode, only_here)
            (SINGLE_RANK if only_here else self._consensus).agree(record)
        except Exception as error:
            if only_here:  # the others replay it now
                raise CaptureError(f"{self._recorder.name}: bucket {bucket} {FAILED_HERE}: {named(error)}") from error
            self._take_back(source, slot, bucket, mode, error)
            return self._failed(source, bucket, mode, error)
        return None

    def _take_back(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, error: Exception) -> None:
        """Forget what this rank recorded and another one could not."""
        source.recordings.pop((slot.index, bucket, mode), None)

    def _failed(self, source: Source, bucket: Bucket, mode: Mode, error: Exception) -> Fallback:
        """Note that a bucket cannot be captured; returns the reason for running eager.

        Raises:
            CaptureError: The region is strict.
        """
        source.failed.note((bucket, mode), reason := reason_of(error))
        said = f"{self._recorder.name}: bucket {bucket} could not be captured"
        if self._strict:
            raise CaptureError(f"{said}: {named(error)}") from error
        if not isinstance(error, OtherRankFailed):  # the rank that failed reports it
            warn(f"{said}, it runs eager: {named(error)}")
        give_back_after(error, self._recorder.executor)
        return reason

    def _add(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, only_here: bool = False) -> float:
        try:
            with self._statistics.recording():
                self._recorder.fill(source, slot, [(bucket, mode)], self._trim)
        finally:
            self._tidy()
        return 0.0


def _failed_for(source: Source, wish: Wish) -> Fallback | None:
    """Return why a recording is not tried now; None where others have one, as in another slot or before."""
    return None if wish in source.recorded_by_other_ranks else source.failed.reason(wish[1:])
