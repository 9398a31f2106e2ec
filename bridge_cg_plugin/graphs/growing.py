"""Recording between two steps what microbatches asked for."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ..announce import announce, warn
from .buckets import Bucket, Demand
from .errors import reason_of
from .fallback import Fallback
from .program import RankConsensus
from .recordings.executor import give_up
from .region import Region, all_idle


class Growing:
    """Records one bucket a step at most: ranks that train other microbatches wait meanwhile.

    Args:
        title: Names the graphs in messages.
        regions: Regions of the module that grow.
        demand: What microbatches asked for, and the buckets that they have.
        consensus: Ranks that see the same microbatches.
        strict: Whether a recording that fails raises.
        counted: Entered around what steps wait for.
        bytes_per_slot: What recordings of one slot may take; None is all there is.
    """

    def __init__(
        self,
        title: str,
        regions: Sequence[Region],
        demand: Demand,
        consensus: RankConsensus,
        strict: bool,
        counted: Callable[[], AbstractContextManager[None]],
        bytes_per_slot: float | None,
    ) -> None:
        self._title, self._regions, self.demand = title, regions, demand
        self._consensus, self._strict, self._counted = consensus, strict, counted
        self._limit = bytes_per_slot
        self._allowed = 1.0  # part of the limit
        demand.evaluated = []  # regions begin with those for training

    def before_step(self, training: bool) -> None:
        """Record what is worth most, if no microbatch is in flight.

        Args:
            training: Whether the step trains, so that a bucket is recorded with its backward.

        Raises:
            CaptureError: It failed, and the run is strict.
        """
        if self.demand.due() and (bucket := self.demand.next()) is not None:
            self._record(bucket, training)

    def _record(self, bucket: Bucket, training: bool) -> None:
        """Record on all ranks alike, where no microbatch is in flight."""
        if not all_idle(self._regions, self._consensus):
            return
        started, what = time.perf_counter(), f"{self._title}: bucket {bucket}"
        try:
            with self._counted():
                self._consensus.agree(partial(self._add, bucket, training))
        except Exception as error:
            executor = self._regions[0].executor
            self._forget(bucket, reason_of(error))
            give_up(error, what, "the others go on", self._strict, executor)
            return
        announce(f"{what} captured in {time.perf_counter() - started:.1f} s")
        self.fit()

    def _add(self, bucket: Bucket, training: bool) -> None:
        for region in self._regions:
            region.add(bucket, training)
        self.demand.add(bucket, training)

    def _forget(self, bucket: Bucket, reason: Fallback = Fallback.CAPTURE_FAILED) -> None:
        """Forget a bucket that failed or does not fit; no larger one is tried where it was the largest."""
        for region in self._regions:
            region.drop(bucket)
        self.demand.refuse(bucket, reason)

    def fit(self) -> None:
        """Drop the largest buckets while recordings take more memory than they may on some rank."""
        if self._limit is None:
            return
        with self._counted():
            excess = self._excess(self._limit)
            while (held := [*self.demand.buckets, *self.demand.evaluated]) and excess > self._allowed:
                bucket = max(held)
                self._forget(bucket)
                warn(f"{self._title}: bucket {bucket} does not fit the memory limit and is dropped")
                excess = self._excess(self._limit)
                shrink = self._consensus.agree(lambda: float(all(region.chain.shrinks for region in self._regions)))
                if not shrink.smallest:
                    self._allowed = excess  # a dropped bucket's memory stays while others are left

    def _excess(self, limit: float) -> float:
        """Return the memory of the fullest slot of any rank, as a part of the limit."""
        return self._consensus.agree(lambda: sum(region.slot_bytes() for region in self._regions) / limit).largest
