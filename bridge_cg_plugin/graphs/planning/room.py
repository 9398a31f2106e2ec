"""How much memory buckets that come on demand may take."""

from collections.abc import Sequence

from ..piece import Growth
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
