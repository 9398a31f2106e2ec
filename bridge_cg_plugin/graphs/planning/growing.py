"""Recording between two steps what microbatches asked for."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ...announce import announce, warn
from ..errors import CaptureError, OtherRankFailed, named, reason_of
from ..rank_consensus import RankConsensus
from ..recordings.executor import give_back_after
from ..recordings.recorder import Wish
from ..region import Region
from .buckets import Bucket
from .demand import Demand


class Room:
    """Looks whether a module's recordings fit, and drops what does not.

    Args:
        bytes_per_slot: Device memory that they may take of one slot; None is all there is.
        regions: Regions of the module that grow.
        demand: The buckets that there are.
    """

    def __init__(self, bytes_per_slot: float | None, regions: Sequence[Region], demand: Demand) -> None:
        self._limit, self._regions, self._demand = bytes_per_slot, regions, demand

    @property
    def limited(self) -> bool:
        """Whether there is a limit to look at."""
        return self._limit is not None

    def excess(self) -> float:
        """Return the memory of the fullest slot over the limit, 0 without one."""
        if self._limit is None:
            return 0.0
        return sum(region.slot_bytes() for region in self._regions) / self._limit

    def shrinks(self) -> float:
        """Return 1 if a dropped bucket gives its memory back, 0 where that stays while others are left."""
        return float(all(region.shrinks for region in self._regions))

    def drop(self, bucket: Bucket) -> None:
        """Drop a bucket; it may be recaptured."""
        for region in self._regions:
            region.drop(bucket)
        self._demand.drop(bucket)


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
        self._room = Room(bytes_per_slot, regions, demand)
        self._allowed = 1.0  # part of the limit
        self._tried = False

    def before_step(self, training: bool) -> bool:
        """Record what is worth most, if no microbatch is in flight; returns whether a recording was tried.

        Args:
            training: Whether the step trains, so that a bucket is recorded with its backward.

        Raises:
            CaptureError: It failed, and the run is strict.
        """
        self._tried = False
        if self.demand.due() and (bucket := self.demand.next()) is not None:
            add, undo = partial(self._add, bucket, training), partial(self._forget, bucket)
            if self._recorded(add, f"bucket {bucket}", undo):
                self.fit()
        elif any(wishes := [region.wishes for region in self._regions]):
            first = next(found for found in wishes if found)[0]
            what = f"bucket {first[1]} for one more microbatch in flight"
            alike = self._alike(wishes, first)
            if self._recorded(partial(_fulfill, alike), what, partial(_take_back, alike)):
                self.fit()
        return self._tried

    def _recorded(
        self, work: Callable[[], None], what: str, undo: Callable[[Exception], None] = lambda error: None
    ) -> bool:
        """Do some work on all ranks alike; returns whether it was done.

        Args:
            work: The work.
            what: Names it.
            undo: Called with the error if it failed.
        """
        if not self._consensus.agree(self._idle).smallest:
            return False
        self._tried, started = True, time.perf_counter()
        try:
            with self._counted():
                self._consensus.agree(partial(_done, work))
        except Exception as error:
            executor = self._regions[0].executor
            undo(error)
            if self._strict:
                raise CaptureError(f"{self._title}: {what} could not be captured: {named(error)}") from error
            if not isinstance(error, OtherRankFailed):  # the rank that failed reports it
                warn(f"{self._title}: {what} could not be captured, the others go on: {named(error)}")
            give_back_after(error, executor)
            return False
        announce(f"{self._title}: {what} captured in {time.perf_counter() - started:.1f} s")
        return True

    def _idle(self) -> float:
        return float(all(region.is_idle() for region in self._regions))

    def _add(self, bucket: Bucket, training: bool) -> None:
        for region in self._regions:
            region.add(bucket, training)
        self.demand.buckets.append(bucket)

    def _forget(self, bucket: Bucket, error: Exception) -> None:
        """Forget a bucket that failed; no larger one is tried where it was the largest."""
        self._room.drop(bucket)
        self.demand.refuse(bucket, reason_of(error))

    def fit(self) -> None:
        """Drop the largest buckets while recordings take more memory than they may on some rank."""
        if not self._room.limited:
            return
        with self._counted():
            excess = self._excess()
            while self.demand.buckets and excess > self._allowed:
                bucket = max(self.demand.buckets)
                self._room.drop(bucket)
                self.demand.refuse(bucket)
                warn(f"{self._title}: bucket {bucket} does not fit the memory limit and is dropped")
                excess = self._excess()
                if not self._consensus.agree(self._room.shrinks).smallest:
                    self._allowed = excess

    def _excess(self) -> float:
        return self._consensus.agree(self._room.excess).largest

    def _alike(self, wishes: Sequence[Sequence[Wish]], first: Wish) -> list[tuple[Region, Wish]]:
        """Return all regions' wishes that are like one of them."""
        index, bucket, mode = first
        return [
            (region, wish)
            for region, found in zip(self._regions, wishes, strict=True)
            for wish in found
            if (wish[0], wish[1].tokens, wish[2]) == (index, bucket.tokens, mode)
        ]


def _fulfill(wishes: Sequence[tuple[Region, Wish]]) -> None:
    for region, wish in wishes:
        region.record_wish(wish)


def _take_back(wishes: Sequence[tuple[Region, Wish]], _: Exception) -> None:
    for region, wish in wishes:
        region.take_back(wish)


def _done(work: Callable[[], None]) -> float:
    work()
    return 0.0
