"""Recordings of a region that is a part of a chain: those with a backward are made with all parts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..changes.source import Source
from ..errors import CaptureError
from ..fallback import Fallback
from ..planning.buckets import Bucket
from ..replays.slot import Slot
from ..reports.statistics import BucketStatistics
from .chain import Chain, Place
from .recorder import Recordings
from .recording import Mode

# Returns what the model is now.
type Finder = Callable[[], Source | Fallback]


class ChainedRecordings(Recordings):
    """See `Recordings` and `chain.Part`.

    Args:
        chain: What the region is a part of.
        others: Further arguments of `Recordings`.
    """

    def __init__(self, chain: Chain, *others: Any) -> None:
        super().__init__(*others)
        self._chain = chain
        self.planned: Sequence[Sequence[Place]] = ()

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
        """See `Recordings`: both would hold each other's memory until a collection."""
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

    def fill(
        self,
        source: Source,
        slot: Slot,
        places: Sequence[Place],
        recorded: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Recordings`; what has a backward is left to the chain."""
        alone = [place for place in places if not place[1].gradients]
        if alone:
            slot.forward_memory = self._chain.forward_memory(slot.index)
        super().fill(source, slot, alone, recorded)

    def _may_always_record(self, slot: Slot, mode: Mode) -> bool:
        # It is in memory of its own; to record it overwrites inputs that all parts have in common.
        return not mode.gradients and slot.shared is None

    def _is_free(self, slot: Slot, mode: Mode) -> bool:
        return not mode.gradients or self._chain.is_free(slot.index)

    def _shared_bytes(self) -> tuple[int, int]:
        return self._chain.shared_bytes(self)

    def _graph_bytes(self, slot: Slot) -> int:
        return self._chain.graph_bytes(slot.index) if self._chain.is_first(self) else 0

    def _trim(self, slot: Slot) -> None:
        self._chain.trim(slot.index)

    def _take_back(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, error: Exception) -> None:
        super()._take_back(source, slot, bucket, mode, error)
        if mode.gradients:
            self._chain.refuse(slot.index, [(bucket, mode)], error)

    def _add(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, only_here: bool = False) -> float:
        place = slot.index, bucket, mode
        try:
            with self._statistics.recording():
                if not mode.gradients:
                    slot.forward_memory = self._chain.forward_memory(slot.index)
                    super().fill(source, slot, [(bucket, mode)])
                elif place not in source.recordings:
                    self._chain.record(slot.index, [(bucket, mode)], only_here=only_here)
        finally:
            self._tidy()
        if place not in source.recordings:
            raise CaptureError(f"{self.name}: the model has changed again since a microbatch asked for it")
        return 0.0
