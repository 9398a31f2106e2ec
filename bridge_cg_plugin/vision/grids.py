"""What the host knows of a batch's `grid_thw` without asking the device."""

from collections import OrderedDict

import torch
from torch import Tensor

Grid = tuple[tuple[int, int, int], ...]


class HostGrids:
    """Remembers host copies of device grids, found again through the storage they share with any view of them.

    A batch's grid is on the host before it is copied to the device; whoever makes that copy calls `remember`. A grid
    that nobody announced is read once and remembered, so only a first sight of it makes the host wait.

    Args:
        capacity: How many grids are kept; older ones are forgotten.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        # The storage is kept alive with its entry, so its address cannot name another tensor's memory.
        self._known: OrderedDict[tuple, tuple[torch.UntypedStorage, int, Grid]] = OrderedDict()
        self.device_reads = 0

    def remember(self, device_grid: Tensor, host_grid: Tensor) -> None:
        """Note that `device_grid`, any shape ending in 3, holds what `host_grid` holds."""
        self._store(device_grid, as_grid(host_grid))

    def lookup(self, grid: Tensor) -> Grid:
        """Return the grid's rows as integers."""
        if grid.device.type == "cpu":
            return as_grid(grid)
        entry = self._known.get(_key(grid))
        if entry is not None and entry[1] == _version(grid):
            return entry[2]
        self.device_reads += 1
        rows = as_grid(grid.cpu())
        self._store(grid, rows)
        return rows

    def _store(self, grid: Tensor, rows: Grid) -> None:
        if grid.device.type == "cpu":
            return
        self._known[_key(grid)] = (grid.untyped_storage(), _version(grid), rows)
        self._known.move_to_end(_key(grid))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


def _key(grid: Tensor) -> tuple:
    return grid.untyped_storage()._cdata, grid.storage_offset(), grid.numel(), grid.dtype


def _version(grid: Tensor) -> int:
    return 0 if grid.is_inference() else grid._version


def as_grid(grid: Tensor) -> Grid:
    """Return a host tensor's rows as tuples of three integers."""
    return tuple((int(t), int(h), int(w)) for t, h, w in grid.reshape(-1, 3).tolist())


def token_count(grid: Grid) -> int:
    """Return how many patches the grid describes."""
    return sum(t * h * w for t, h, w in grid)


def frame_count(grid: Grid) -> int:
    """Return how many frames, hence attention segments, the grid describes."""
    return sum(t for t, _, _ in grid)


def largest_frame(grid: Grid) -> int:
    """Return the tokens of the largest frame."""
    return max((h * w for _, h, w in grid), default=0)
