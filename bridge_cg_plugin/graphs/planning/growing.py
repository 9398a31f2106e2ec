"""Recording between two steps what microbatches asked for."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ...announce import announce, warn
from ..errors import CaptureError, OtherRankFailed, named, reason_of
from ..piece import Growth
from ..rank_consensus import RankConsensus
from ..recordings.executor import give_back_after
from ..recordings.late_recordings import Wish
from ..region import Region
from .buckets import Bucket
from .demand import Demand


class Room:
    """Looks whether a module's recordings fit, and drops what may be dropped.

    Args:
        bytes_per_slot: Device memory that they may take of one slot; None is all there is.
        regions: Regions of the module, with what makes each grow.
        demand: The buckets that there are.
    """

    def __init__(self, bytes_per_slot: float | None, regions: Sequence[tuple[Region, Growth]], demand: Demand) -> None:
        self._limit, self._regions, self._demand = bytes_per_slot, regions, demand

    @property
    def limited(self) -> bool:
        """Whether there is a limit to look at."""
        return self._limit is not None

    def excess(self, settled: bool = False) -> float:
        """Return the memory of the fullest slot over the limit, 0 without one.

        Args:
            settled: Whether to leave out recordings that can move into the memory of the largest.
        """
        if self._limit is None:
            return 0.0
        return sum(region.slot_bytes(settled) for region, _ in self._regions) / self._limit

    def drop(self, bucket: Bucket) -> None:
        """Drop a bucket; it may be recaptured."""
        for region, growth in self._regions:
            region.drop(growth.bucket_of(bucket))
        self._demand.drop(bucket)

    def drop_outdated(self) -> None:
        """Drop all but the largest recordings; microbatches ask for the others again, in shared memory."""
        for region, _ in self._regions:
            region.drop_outdated()


# Steps without a larger bucket after which recordings move into the memory of the largest.
SETTLED = 16


class Growing:
    """Records one bucket a step at most: ranks that train other microbatches wait meanwhile.

    Args:
        title: Names the graphs in messages.
        regions: Regions of the module, with what makes each grow.
        demand: What microbatches asked for, and the buckets that they have.
        consensus: Ranks that see the same microbatches.
        strict: Whether a recording that fails raises.
        counted: Entered around what steps wait for.
        bytes_per_slot: What recordings of one slot may take; None is all there is.
    """

    def __init__(
        self,
        title: str,
        regions: Sequence[tuple[Region, Growth]],
        demand: Demand,
        consensus: RankConsensus,
        strict: bool,
        counted: Callable[[], AbstractContextManager[None]],
        bytes_per_slot: float | None,
    ) -> None:
        self._title, self._regions, self.demand = title, regions, demand
        self._consensus, self._strict, self._counted = consensus, strict, counted
        self._room = Room(bytes_per_slot, regions, demand)
        self._quiet = 0
        self._tried = False

    def before_step(self, training: bool) -> bool:
        """Record what is worth most, if no microbatch is in flight; returns whether a recording was tried.

        Args:
            training: Whether the step trains, so that a bucket is recorded with its backward.

        Raises:
            CaptureError: It failed, and the run is strict.
        """
        self._quiet += 1
        self._tried = False
        if self.demand.due() and (bucket := self.demand.next()) is not None:
            if bucket.tokens > max((other.tokens for other in self.demand.buckets), default=0):
                self._quiet = 0
            add, undo = partial(self._add, bucket, training), partial(self._forget, bucket)
            if self._recorded(add, f"bucket {bucket}", undo):
                self._fit(bucket)
        elif any(wishes := [region.wishes for region, _ in self._regions]):
            first = next(found for found in wishes if found)[0]
            what = f"bucket {first[1]} for one more microbatch in flight"
            alike = self._alike(wishes, first)
            if self._recorded(partial(_fulfill, alike), what, partial(_take_back, alike)):
                self._fit()
        elif self._quiet > SETTLED:
            self._move()
        return self._tried

    def _move(self) -> None:
        """Recapture one bucket in the memory of the largest."""
        outdated = [(region, region.outdated()) for region, _ in self._regions]
        found = [(region, wish) for region, wish in outdated if wish is not None]
        if not found:
            self._quiet = 0
        elif not self._recorded(partial(self._recapture, found), f"bucket {found[0][1][1]} once more, in less memory"):
            self._quiet = -SETTLED

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
            executor = self._regions[0][0].executor
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
        return float(all(region.is_idle() for region, _ in self._regions))

    def _add(self, bucket: Bucket, training: bool) -> None:
        for region, growth in self._regions:
            region.add(growth.bucket_of(bucket), training)
        self.demand.buckets.append(bucket)

    def _forget(self, bucket: Bucket, error: Exception) -> None:
        """Forget a bucket that failed; no larger one is tried where it was the largest."""
        self._room.drop(bucket)
        self.demand.refuse(bucket, reason_of(error))

    def _fit(self, bucket: Bucket | None = None) -> None:
        """Keep within the memory limit after a recording.

        The bucket goes, unless it fits once all share its memory: then the others are recaptured when microbatches ask
        for them.
        """
        if not self._room.limited:
            return
        with self._counted():
            if not self._over():
                return
            if bucket is not None and self._over(settled=True):
                self._room.drop(bucket)
                self.demand.refuse(bucket)
                warn(f"{self._title}: bucket {bucket} does not fit the memory limit and is dropped")
            else:
                self._room.drop_outdated()

    def _over(self, settled: bool = False) -> bool:
        """Whether recordings take more than they may on some rank."""
        return self._consensus.agree(partial(self._room.excess, settled)).largest > 1

    def _alike(self, wishes: Sequence[Sequence[Wish]], first: Wish) -> list[tuple[Region, Wish]]:
        """Return all regions' wishes that are like one of them."""
        index, bucket, mode = first
        return [
            (region, wish)
            for (region, _), found in zip(self._regions, wishes, strict=True)
            for wish in found
            if (wish[0], wish[1].tokens, wish[2]) == (index, bucket.tokens, mode)
        ]

    def _recapture(self, found: Sequence[tuple[Region, Wish]]) -> None:
        for region, wish in found:
            region.recapture(wish)


def _fulfill(wishes: Sequence[tuple[Region, Wish]]) -> None:
    for region, wish in wishes:
        region.record_wish(wish)


def _take_back(wishes: Sequence[tuple[Region, Wish]], _: Exception) -> None:
    for region, wish in wishes:
        region.take_back(wish)


def _done(work: Callable[[], None]) -> float:
    work()
    return 0.0
