"""Recording between two steps what microbatches asked for."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from ..announce import announce, warn
from .buckets import Bucket
from .demand import Demand
from .errors import CaptureError, OtherRankFailed, named, release_frames
from .late_recordings import Wish
from .piece import Growth
from .rank_consensus import RankConsensus
from .region import Region

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
    """

    def __init__(
        self,
        title: str,
        regions: Sequence[tuple[Region, Growth]],
        demand: Demand,
        consensus: RankConsensus,
        strict: bool,
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._title, self._regions, self.demand = title, regions, demand
        self._consensus, self._strict, self._counted = consensus, strict, counted
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
            self._recorded(partial(self._add, bucket, training), f"bucket {bucket}", partial(self._drop, bucket))
        elif any(wishes := [region.wishes for region, _ in self._regions]):
            first = next(found for found in wishes if found)[0]
            what = f"bucket {first[1]} for one more microbatch in flight"
            self._recorded(partial(self._fulfill, wishes, first), what)
        elif self._quiet > SETTLED:
            self._move()
        return self._tried

    def _move(self) -> None:
        """Make one recording again in the memory of the largest."""
        outdated = [(region, region.outdated()) for region, _ in self._regions]
        found = [(region, wish) for region, wish in outdated if wish is not None]
        if not found:
            self._quiet = 0
        elif not self._recorded(partial(self._renew, found), f"bucket {found[0][1][1]} anew, in less memory"):
            self._quiet = -SETTLED

    def _recorded(self, work: Callable[[], None], what: str, undo: Callable[[], None] = lambda: None) -> bool:
        """Do some work on all ranks alike; returns whether it was done."""
        if not self._consensus.agree(self._idle).smallest:
            return False
        self._tried, started = True, time.perf_counter()
        try:
            with self._counted():
                self._consensus.agree(partial(_done, work))
        except Exception as error:
            undo()
            if self._strict:
                raise CaptureError(f"{self._title}: {what} could not be captured: {named(error)}") from error
            if not isinstance(error, OtherRankFailed):  # the rank that failed says it
                warn(f"{self._title}: {what} could not be captured, the others go on: {named(error)}")
            release_frames(error)
            return False
        announce(f"{self._title}: {what} captured in {time.perf_counter() - started:.1f} s")
        return True

    def _idle(self) -> float:
        return float(all(region.is_idle() for region, _ in self._regions))

    def _add(self, bucket: Bucket, training: bool) -> None:
        for region, growth in self._regions:
            region.add(growth.bucket_of(bucket), training)
        self.demand.buckets.append(bucket)

    def _drop(self, bucket: Bucket) -> None:
        """Forget a bucket that failed; no larger one is tried where it was the largest."""
        for region, growth in self._regions:
            region.drop(growth.bucket_of(bucket))
        self.demand.refuse(bucket)

    def _fulfill(self, wishes: Sequence[Sequence[Wish]], first: Wish) -> None:
        index, bucket, mode = first
        for (region, _), found in zip(self._regions, wishes, strict=True):
            for wish in found:
                if (wish[0], wish[1].tokens, wish[2]) == (index, bucket.tokens, mode):
                    region.record_wish(wish)

    def _renew(self, found: Sequence[tuple[Region, Wish]]) -> None:
        for region, wish in found:
            region.renew(wish)


def _done(work: Callable[[], None]) -> float:
    work()
    return 0.0
