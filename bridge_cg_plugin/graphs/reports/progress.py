"""Progress messages of a capture."""

import time
from collections.abc import Callable, Sequence

from ...announce import announce
from ..planning.buckets import Bucket

# From so many recordings on, a capture takes more than a few seconds.
MANY = 4
EVERY_S = 5.0


class Progress:
    """Announces how many recordings of a capture are made, at its start and every few seconds.

    Args:
        title: What is captured.
        regions: Regions that it consists of, each with as many recordings.
        clock: Returns seconds.
    """

    def __init__(self, title: str, regions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._regions, self._clock = title, regions, clock
        self._done = self._total = 0
        self._started = self._said = clock()

    def starts(self, recordings: int, buckets: Sequence[Bucket], slots: int) -> None:
        """Note that a region begins to record; only the first one is announced.

        Args:
            recordings: How many the region will make.
            buckets: What they are of.
            slots: How many times each.
        """
        if self._total:
            return
        self._total = recordings * self._regions
        if self._total >= MANY:
            parts = f" for each of {self._regions} parts" if self._regions > 1 else ""
            largest = f"{len(buckets)} bucket(s), the largest {max(buckets)}"
            announce(f"{self._title}: {self._total} recordings begin: {largest}; {slots} slot(s){parts}")

    def recorded(self) -> None:
        """Count one recording."""
        self._done += 1
        now = self._clock()
        if self._done < self._total and now - self._said >= EVERY_S:
            self._said = now
            announce(f"{self._title}: {self._done} of {self._total} recordings made in {now - self._started:.0f} s")
