"""Bridge's batch steps: grids are noted on the host before they are copied to the device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .helper import GRIDS
from .patches import Patch
from .registry import SEAMS

GRID_FIELDS = ("image_grid_thw", "video_grid_thw")


class _Noting:
    """Passes an iterator through and keeps the host grids of the last batch."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.grids: dict[str, Tensor] = {}

    def __iter__(self) -> "_Noting":
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        visual = batch.get("visual_inputs") if isinstance(batch, dict) else None
        for name in GRID_FIELDS:
            grid = getattr(visual, name, None)
            if grid is not None and grid.device.type == "cpu":
                self.grids[name] = grid
        return batch


def _with_host_grids(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(old)
    def get_batch_from_iterator(data_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        noting = _Noting(data_iterator)
        batch = old(noting, *args, **kwargs)
        for name, host in noting.grids.items():
            device = getattr(batch.get("visual_inputs"), name, None)
            if device is not None:
                GRIDS.remember(device, host)
        return batch

    return get_batch_from_iterator


PATCHES = tuple(Patch(entry, _with_host_grids) for entry in SEAMS if entry.patched_by == "batches")
