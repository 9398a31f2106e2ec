"""What makes a region a part of a chain."""

from collections.abc import Callable, Iterable, Sequence

from ..changes.source import Source
from ..changes.sources import Sources
from ..fallback import Fallback
from ..planning.buckets import Bucket
from ..replays.slot import Slot
from .chain import Place
from .late_recordings import LateRecordings
from .recorder import Recorder


class Link:
    """See `chain.Part`. It lives as long as one capture of a region.

    Args:
        recorder: Makes the region's recordings.
        sources: What they were made from.
        late: Has the region's slots.
        source: Returns what the model is now.
        planned: What is recorded in each slot at once.
    """

    def __init__(
        self,
        recorder: Recorder,
        sources: Sources,
        late: LateRecordings,
        source: Callable[[], Source | Fallback],
        planned: Sequence[Sequence[Place]],
    ) -> None:
        self.name, self.planned, self.source = recorder.name, planned, source
        self._sources, self._late = sources, late
        self.recording, self.warmed_up = recorder.recording, recorder.warmed_up
        self.checked, self.keep = recorder.checked, recorder.keep
        self.count_memory = late.count_memory

    def slot(self, index: int) -> Slot:
        """See `Part`."""
        return self._late.slot(index)

    def every_source(self) -> Iterable[Source]:
        """See `Part`."""
        return self._sources

    def expect(self, bucket: Bucket) -> None:
        """See `Part`."""
        self._late.expect(bucket)
