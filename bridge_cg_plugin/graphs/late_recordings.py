"""Recordings that microbatches ask for once graphs exist: of a bucket, a mode or a state of the model that has none."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from ..announce import warn
from .buckets import Bucket
from .changes.source import Recorded, Source
from .changes.sources import LASTING, Sources
from .errors import CaptureError, OtherRankFailed, named
from .fallback import Fallback
from .gradients import NO_BACKWARD
from .piece import SINGLE_RANK
from .rank_consensus import RankConsensus, SingleRank
from .recorder import Recorder
from .recording import Mode
from .slot import Slot

FAILED_ALONE = "was to be recorded anew because memory was moved on this rank, and could not be"


class LateRecordings:
    """Finds a free slot with a recording, and makes what is missing. It lives as long as one capture of a region.

    Args:
        recorder: Makes slots and recordings.
        sources: What recordings were made from.
        slots: The region's, all made.
        consensus: Ranks that record together with this one or not at all.
        strict: Whether a recording that fails raises.
        before_replay: Called before a recording, too, which reads parameters; see `Surroundings`.

    Attributes:
        forward_slot: For passes without a backward while another microbatch holds the first slot; None without one.
    """

    def __init__(
        self,
        recorder: Recorder,
        sources: Sources,
        slots: Sequence[Slot],
        consensus: RankConsensus,
        strict: bool,
        before_replay: Callable[[], None] | None,
    ) -> None:
        self._recorder, self._sources, self._slots = recorder, sources, slots
        self._consensus, self._strict, self._before_replay = consensus, strict, before_replay
        self.forward_slot: Slot | None = None
        self._no_forward_slot = False
        self._asked: Counter[Hashable] = Counter()

    def count_memory(self) -> None:
        """Note what slots, gradients and offloaded activations take now in the region's statistics."""
        statistics, offloading = self._recorder.statistics, self._recorder.offloading
        slots = [*self._slots, *([] if self.forward_slot is None else [self.forward_slot])]
        statistics.static_bytes = sum(slot.arena.nbytes for slot in slots)
        statistics.gradient_bytes = sum(source.sinks.static_bytes for source in self._sources)
        statistics.pinned_bytes = 0 if offloading is None else offloading.pinned_bytes

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
            slot = self._free_slot(mode, index, source.lasting)
        except Exception as error:  # no memory for one more slot
            self.forward_slot, self._no_forward_slot = None, True
            return self._failed(source, bucket, mode, error)
        if slot is None:
            return Fallback.NO_FREE_SLOT
        recorded = source.recordings.get((slot.index, bucket, mode))
        if recorded is None:
            refusal = self._record_now(source, slot, bucket, mode) if records else Fallback.NOT_CAPTURED_YET
            if refusal is not None:
                return refusal
            recorded = source.recordings[slot.index, bucket, mode]
        return slot, recorded

    def _free_slot(self, mode: Mode, index: int | None, lasting: bool) -> Slot | None:
        """Return a slot that no microbatch holds."""
        if index is not None or mode.gradients:
            for slot in self._slots if index is None else self._slots[index : index + 1]:
                if slot.free:
                    return slot
            return None
        return self._slots[0] if self._slots[0].free else self._forward_only_slot(lasting)

    def _forward_only_slot(self, lasting: bool) -> Slot | None:
        """Return a slot for passes without a backward while another microbatch holds the first one.

        It is made once such passes come again: a reference pass between a policy's forward and its backward.
        """
        missing = self.forward_slot is None and not self._no_forward_slot
        if missing and (lasting or self._asked_before("forward-only slot")):
            self._consensus.agree(self._add_forward_only_slot)
        return self.forward_slot

    def _add_forward_only_slot(self) -> float:
        self.forward_slot = self._recorder.slot(len(self._slots))
        return 0.0

    def _asked_before(self, what: Hashable) -> bool:
        self._asked[what] += 1
        return self._asked[what] >= LASTING

    def _record_now(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> Fallback | None:
        """Record what a batch asks for; returns why it cannot be or is not yet."""
        if (bucket, mode) in source.failed:
            return Fallback.CAPTURE_FAILED
        if not source.lasting and not self._asked_before((mode, slot is self.forward_slot)):
            return Fallback.MODE_NOT_CAPTURED
        if torch._C._current_graph_task_id() != NO_BACKWARD or _is_capturing():
            return Fallback.NOT_CAPTURED_YET
        if self._before_replay is not None:
            self._before_replay()
        started = time.perf_counter()
        others_have_it = (slot.index, bucket, mode) in source.recorded_by_other_ranks
        alone = others_have_it and not isinstance(self._consensus, SingleRank)
        try:
            (SINGLE_RANK if alone else self._consensus).agree(partial(self._add, source, slot, bucket, mode))
        except Exception as error:
            if alone:  # the others replay it now
                raise CaptureError(f"{self._recorder.name}: bucket {bucket} {FAILED_ALONE}: {named(error)}") from error
            return self._failed(source, bucket, mode, error)
        finally:
            self._recorder.statistics.capture_seconds += time.perf_counter() - started
            self.count_memory()
        return None

    def _failed(self, source: Source, bucket: Bucket, mode: Mode, error: Exception) -> Fallback:
        """Note that a bucket cannot be captured; returns the reason for running eager.

        Raises:
            CaptureError: The region is strict.
        """
        source.failed[bucket, mode] = named(error)
        said = f"{self._recorder.name}: bucket {bucket} could not be captured"
        if self._strict:
            raise CaptureError(f"{said}: {named(error)}") from error
        if not isinstance(error, OtherRankFailed):  # the rank that failed says it
            warn(f"{said}, it runs eager: {named(error)}")
        return Fallback.CAPTURE_FAILED

    def _add(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> float:
        if not any(each.uses(slot) for each in self._sources):
            slot.pool = self._recorder.executor.new_pool()  # PyTorch takes no handle again whose graphs are all gone
        self._recorder.add(source, slot, bucket, mode)
        return 0.0


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
