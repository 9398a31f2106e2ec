"""How much memory buckets that come on demand may take, and what makes room for one more."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..piece import Growth
from ..region import Region
from .buckets import Bucket
from .demand import Demand


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What recordings may take.

    Attributes:
        bytes_per_slot: Device memory of one slot; None is all there is.
        unused_steps: A bucket that was used in none of so many steps may be dropped for one that is wanted; None keeps
            all.
    """

    bytes_per_slot: float | None = None
    unused_steps: int | None = None


UNLIMITED = MemoryLimit()


class Room:
    """Looks whether a module's recordings fit, and drops what may be dropped.

    Args:
        limit: What they may take.
        regions: Regions of the module, with what makes each grow.
        demand: The buckets that there are.
    """

    def __init__(self, limit: MemoryLimit, regions: Sequence[tuple[Region, Growth]], demand: Demand) -> None:
        self._limit, self._regions, self._demand = limit, regions, demand

    @property
    def limited(self) -> bool:
        """Whether there is a limit to look at."""
        return self._limit.bytes_per_slot is not None

    def excess(self, settled: bool = False) -> float:
        """Return the memory of the fullest slot over the limit, 0 without one.

        Args:
            settled: Whether to leave out recordings that can move into the memory of the largest.
        """
        if self._limit.bytes_per_slot is None:
            return 0.0
        return sum(region.slot_bytes(settled) for region, _ in self._regions) / self._limit.bytes_per_slot

    def victim(self) -> Bucket | None:
        """Return a bucket that may be dropped for another one, None without one; alike on ranks that share layers."""
        if self._limit.unused_steps is None:
            return None
        used = {bucket: self._last_step(bucket) for bucket in self._demand.buckets}
        now = max(region.statistics.step for region, _ in self._regions)
        return self._demand.victim(used, now - self._limit.unused_steps + 1)

    def _last_step(self, bucket: Bucket) -> int:
        return max(region.statistics.buckets[growth.bucket_of(bucket)].last_step for region, growth in self._regions)

    def drop(self, bucket: Bucket) -> None:
        """Drop a bucket; it may be recaptured."""
        for region, growth in self._regions:
            region.drop(growth.bucket_of(bucket))
        self._demand.drop(bucket)

    def drop_outdated(self) -> None:
        """Drop all but the largest recordings; microbatches ask for the others again, in shared memory."""
        for region, _ in self._regions:
            region.drop_outdated()
