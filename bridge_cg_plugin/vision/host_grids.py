"""Host copies of a batch's `grid_thw`, which save a synchronization."""

from functools import lru_cache

from torch import Tensor

from ..graphs.host_copies import HostCopies, as_integers
from .shape import Shape

Grid = tuple[tuple[int, int, int], ...]
# Grids whose sums are kept: a replay asks for them once for each bucket that it may take.
KEPT_GRIDS = 64


class HostGrids(HostCopies):
    """Host copies of device grids, any shape ending in 3."""

    def lookup(self, grid: Tensor) -> Grid:
        """Return the grid's rows as integers."""
        return _rows(self.values(grid))


def as_grid(grid: Tensor) -> Grid:
    """Return a host tensor's rows as tuples of three integers."""
    return _rows(as_integers(grid))


def _rows(values: tuple[int, ...]) -> Grid:
    return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


@lru_cache(KEPT_GRIDS)
def token_count(grid: Grid) -> int:
    """Return how many patches the grid describes."""
    return sum(t * h * w for t, h, w in grid)


@lru_cache(KEPT_GRIDS)
def shape_of_rows(grid: Grid) -> Shape:
    """Return the shape of images and videos of a grid."""
    frames = sum(t for t, _, _ in grid)
    return Shape(token_count(grid), frames, max((h * w for _, h, w in grid), default=0))
