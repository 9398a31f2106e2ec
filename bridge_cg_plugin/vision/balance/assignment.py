"""Which images move between data-parallel ranks, so that no encoder has much more to do than the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..host_grids import Grid, token_count


@dataclass(frozen=True)
class Plan:
    """Where the images of one microbatch of every rank are encoded.

    A rank encodes its images by the rank that they come from, and of one rank in that rank's order.

    Attributes:
        grids: Every rank's images, one row each.
        encoders: For every rank, which rank encodes each of its images.
    """

    grids: tuple[Grid, ...]
    encoders: tuple[tuple[int, ...], ...]

    def order(self, rank: int) -> tuple[int, ...]:
        """Return the places of a rank's images in the order in which it sends them: by rank, then by place."""
        encoders = self.encoders[rank]
        return tuple(sorted(range(len(encoders)), key=lambda place: (encoders[place], place)))

    def encoded(self, rank: int) -> Grid:
        """Return the images that a rank encodes, in its order."""
        pairs = (zip(rows, encoders, strict=True) for rows, encoders in zip(self.grids, self.encoders, strict=True))
        return tuple(row for pair in pairs for row, encoder in pair if encoder == rank)

    def sent(self, rank: int) -> tuple[int, ...]:
        """Return how many patches a rank sends to each rank to be encoded."""
        return tuple(self._patches[rank][to] for to in range(len(self.grids)))

    def received(self, rank: int) -> tuple[int, ...]:
        """Return how many patches a rank gets from each rank to encode."""
        return tuple(patches[rank] for patches in self._patches)

    @property
    def most(self) -> int:
        """Patches of the rank that has the most before images move."""
        return max(map(token_count, self.grids))

    @property
    def saved(self) -> int:
        """Patches by which the rank that encodes the most has fewer than without moves."""
        return self.most - max(sum(self.received(rank)) for rank in range(len(self.grids)))

    @property
    def moved(self) -> int:
        """Images that another rank encodes than the one that has them."""
        return sum(encoder != rank for rank, encoders in enumerate(self.encoders) for encoder in encoders)

    @cached_property
    def _patches(self) -> tuple[tuple[int, ...], ...]:
        """Patches from each rank to each."""
        return tuple(
            tuple(
                token_count(tuple(row for row, e in zip(rows, encoders, strict=True) if e == to))
                for to in range(len(self.grids))
            )
            for rows, encoders in zip(self.grids, self.encoders, strict=True)
        )


def plan_moves(grids: Sequence[Grid], share: float) -> Plan | None:
    """Return where images are encoded, the same on every rank that has the same grids; None where moving does not pay.

    Images move one by one from the rank that has the most patches to the one that has the fewest, each time the one
    that leaves the larger of the two smallest, until none lowers it. A rank that has images keeps some.

    Args:
        grids: Every rank's images.
        share: Part of the largest rank's patches that moving must save; with 0 any.
    """
    encoders = [[rank] * len(rows) for rank, rows in enumerate(grids)]
    loads = [token_count(rows) for rows in grids]
    before = max(loads)
    while (move := _best_move(grids, encoders, loads)) is not None:
        origin, place, to = move
        patches = token_count((grids[origin][place],))
        loads[encoders[origin][place]] -= patches
        loads[to] += patches
        encoders[origin][place] = to
    if max(loads) > (1 - share) * before or max(loads) == before:
        return None
    return Plan(tuple(grids), tuple(map(tuple, encoders)))


def _best_move(
    grids: Sequence[Grid], encoders: Sequence[Sequence[int]], loads: Sequence[int]
) -> tuple[int, int, int] | None:
    """Return (rank, place, new encoder) of the image that best levels the largest and the smallest load, if any."""
    most, least = loads.index(max(loads)), loads.index(min(loads))
    candidates = [
        (max(loads[most] - patches, loads[least] + patches), origin, place)
        for origin, rows in enumerate(grids)
        for place, row in enumerate(rows)
        if encoders[origin][place] == most and (patches := token_count((row,))) < loads[most] - loads[least]
    ]
    if not candidates:
        return None
    _, origin, place = min(candidates)
    return origin, place, least
