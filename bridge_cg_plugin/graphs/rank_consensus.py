"""Ranks that must be on graphs together or not at all: how they learn that one of them cannot be.

Under tensor parallelism the ranks of a group share every layer: if one replayed a padded microbatch while another ran
it eager, their collectives would not fit each other. So they agree while graphs are made, and no step needs a word.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed

from .errors import OtherRankFailed, named


@dataclass(frozen=True, slots=True)
class Agreed:
    """The smallest and the largest of all ranks' values."""

    smallest: float
    largest: float

    @property
    def same(self) -> bool:
        """Whether all ranks have one value."""
        return self.smallest == self.largest


def digest(*planned: object) -> float:
    """Return a number for `RankConsensus.agree` that stands for what a rank planned, by its representation."""
    return float(zlib.crc32(repr(planned).encode()))


class RankConsensus(Protocol):
    """The ranks that stay together; each calls `agree` as often as the others.

    Attributes:
        ranks: Their numbers in the whole job; none where this rank has nobody to agree with.
    """

    ranks: tuple[int, ...]

    def agree(self, work: Callable[[], float]) -> Agreed:
        """Do this rank's work; returns once every rank did its own.

        Args:
            work: Must wait for no other rank, except in an agreement of some of these ranks that all of those take part
                in. Returns a number to compare. What it raises on this rank is raised again.

        Raises:
            OtherRankFailed: Another rank's work failed.
        """


class SingleRank:
    """One rank, which has nobody to agree with."""

    ranks: tuple[int, ...] = ()

    def agree(self, work: Callable[[], float]) -> Agreed:
        """See `RankConsensus`."""
        value = work()
        return Agreed(value, value)


class GroupConsensus:
    """The ranks of a process group: one reduction of three numbers for each agreement, and names where one failed.

    Args:
        group: The process group.
        device: Where its reductions run.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.ranks = tuple(distributed.get_process_group_ranks(group))
        # Made here: a rank that runs out of memory must still be able to say so.
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)

    def agree(self, work: Callable[[], float]) -> Agreed:
        """See `RankConsensus`."""
        failure: Exception | None = None
        value = 0.0
        try:
            value = work()
        except Exception as error:
            failure = error
        failed, largest, negative = self._largest((float(failure is not None), value, -value))
        if not failed:
            return Agreed(-negative, largest)
        reasons = self._reasons(failure)
        first = min(reasons)
        if failure is None or distributed.get_rank() != first:
            raise OtherRankFailed(f"rank {first} failed: {reasons[first]}") from failure
        failure.add_note(f"This was rank {first}; ranks {', '.join(map(str, self.ranks))} stay together.")
        raise failure

    def _largest(self, values: tuple[float, ...]) -> list[float]:
        self._numbers.copy_(torch.tensor(values, dtype=torch.float64))
        distributed.all_reduce(self._numbers, distributed.ReduceOp.MAX, group=self._group)
        return self._numbers.tolist()

    def _reasons(self, failure: Exception | None) -> dict[int, str]:
        """Return why ranks failed by themselves, by rank of the whole job."""
        reason = None if failure is None or isinstance(failure, OtherRankFailed) else named(failure)
        own = (distributed.get_rank(), reason)
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, own, group=self._group)
        return {rank: reason for rank, reason in found if reason is not None}
