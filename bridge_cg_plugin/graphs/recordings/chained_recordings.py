"""Recordings of a region that is a part of a chain: those with a backward are made with all parts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..changes.source import Source
from ..errors import CaptureError
from ..fallback import Fallback
from ..planning.buckets import Bucket
from ..replays.slot import Slot
from ..reports.statistics import BucketStatistics
from .chain import Chain, Place
from .late_recordings import LateRecordings, is_settled
from .recorder import Recorder
from .recording import Mode

# Returns what the model is now.
type Finder = Callable[[], Source | Fallback]


class ChainedRecordings(LateRecordings):
    """See `LateRecordings` and `chain.Part`.

    Args:
        chain: What the region is a part of.
        recorder: Makes slots and recordings.
        others: Further arguments of `LateRecordings`.
    """

    def __init__(self, chain: Chain, recorder: Recorder, *others: Any) -> None:
        super().__init__(recorder, *others)
        self._chain, self.name = chain, recorder.name
        self.recording, self.warmed_up = recorder.recording, recorder.warmed_up
        self.checked, self.keep = recorder.checked, recorder.keep
        self.planned: Sequence[Sequence[Place]] = ()
        # What microbatches asked for last in each slot.
        self._wanted: dict[int, set[Place]] = defaultdict(set)

    def join(self, source: Finder, planned: Sequence[Sequence[Place]]) -> None:
        """Become the last part of the chain.

        Args:
            source: Returns what the model is now.
            planned: What a capture records in each slot.
        """
        self.source = source
        self.planned = [[place for place in places if place[1].gradients] for places in planned]
        self._chain.join(self)

    def leave(self) -> None:
        """See `LateRecordings`: both would hold each other's memory until a collection."""
        self._chain.leave(self)

    def slot(self, index: int) -> Slot:
        """See `Part`."""
        return self._every_slot()[index]

    def every_source(self) -> Iterable[Source]:
        """See `Part`."""
        return self._sources

    def expect(self, bucket: Bucket) -> None:
        """See `Part`.

        Raises:
            CaptureError: There is no memory for the static inputs.
        """
        self._statistics.buckets.setdefault(bucket, BucketStatistics())
        self.add_inputs(bucket)

    def fill(self, source: Source, slot: Slot, places: Sequence[Place], recorded: Callable[[], None]) -> None:
        """See `LateRecordings`; what has a backward is left to the chain."""
        alone = [place for place in places if not place[1].gradients]
        if alone:
            slot.forward_pool = self._chain.forward_pool(slot.index)
        super().fill(source, slot, alone, recorded)

    def catch_up(self, source: Source, index: int) -> None:
        """Record what the last microbatches asked for in a slot that is free in all parts of the chain.

        Raises:
            CaptureError: A recording failed, and the region is strict.
        """
        for bucket, mode in self._wanted_now(index):
            there = (index, bucket, mode) in source.recordings or bucket not in self._slots[index].buffers
            if not there and not self._awaits_a_step(source, mode):
                self._record_now(source, self._slots[index], bucket, mode)

    def _wanted_now(self, index: int) -> set[Place]:
        """Return what the last microbatches like the one that begins asked for in a slot, and forget it."""
        training, gradients = self._sources.training, torch.is_grad_enabled()
        now = {
            (bucket, mode)
            for bucket, mode in self._wanted[index]
            if mode.training == training and (gradients or not mode.gradients)
        }
        self._wanted[index] -= now
        return now

    def _free_slot(self, source: Source, bucket: Bucket, mode: Mode, index: int | None) -> Slot | None:
        slot = super()._free_slot(source, bucket, mode, index)
        if slot is not None:
            self._wanted[slot.index].add((bucket, mode))
        return slot

    def _may_always_record(self, mode: Mode) -> bool:
        return not mode.gradients  # which is in memory of its own

    def _is_free(self, slot: Slot, mode: Mode) -> bool:
        return not mode.gradients or self._chain.is_free(slot.index)

    def _shared_bytes(self) -> tuple[int, int]:
        return self._chain.shared_bytes(self)

    def _settle_pools(self) -> None:
        for slot in self._slots:
            self._chain.settle(slot.index)

    def _add(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> float:
        place = slot.index, bucket, mode
        try:
            with self._statistics.recording():
                if not mode.gradients:
                    slot.forward_pool = self._chain.forward_pool(slot.index)
                    self._recorder.fill(source, slot, [(bucket, mode)])
                elif place not in source.recordings or not is_settled(source, slot, place):
                    self._chain.record(slot.index, [(bucket, mode)])
        finally:
            self._tidy()
        if place not in source.recordings:
            raise CaptureError(f"{self.name}: the model has changed again since a microbatch asked for it")
        return 0.0
