"""Bridge's batch steps: grids, packs' offsets and token ids are noted on the host before they go to the device.

Where graphs are on they go there on a stream of their own.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ....graphs.host_copies import HostCopies, HostTensors, on_host
from ....language.packed.batch import OFFSETS, PADDED_OFFSETS
from ...host_batch import GRIDS, PACK_OFFSETS, TOKENS
from ...seams.patches import Patch
from ...seams.registry import SEAMS
from ..helpers.graph_helper import any_on_graphs
from .batch_copies import CopyStream, copies_aside

GRID_FIELDS = ("image_grid_thw", "video_grid_thw", "image_sizes")
# Today's names, then those of older batches.
OFFSET_FIELDS = (*OFFSETS, *PADDED_OFFSETS, "cu_seqlens", "cu_seqlens_unpadded")
# Where the host's copies of a batch's fields are kept.
KEEPERS: dict[str, HostCopies | HostTensors] = {
    **dict.fromkeys(GRID_FIELDS, GRIDS),
    **dict.fromkeys(OFFSET_FIELDS, PACK_OFFSETS),
    **dict.fromkeys(("tokens", "input_ids"), TOKENS),
}
COPIES = CopyStream()


class _Noting:
    """Passes an iterator through and keeps the host tensors of the last batch that the host must know later."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._fetched: list[Any] = []
        self.noted: dict[str, Tensor] = {}

    def __iter__(self) -> "_Noting":
        return self

    def fetch(self) -> None:
        """Take the next batch now, and give it to whoever asks next.

        Raises:
            StopIteration: There is none.
        """
        self._fetched.append(next(self))

    def __next__(self) -> Any:
        if self._fetched:
            return self._fetched.pop()
        batch = next(self._iterator)
        on_graphs = any_on_graphs()
        self.noted = {
            name: tensor
            for name, tensor in _fields_of(batch).items()
            if on_host(tensor) and (on_graphs or KEEPERS[name] is not TOKENS)
        }
        return batch


def _fields_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch whose values the host may need."""
    if not isinstance(batch, dict):
        return {}
    visual = batch.get("visual_inputs")
    found = {name: getattr(visual, name, None) if name in GRID_FIELDS else batch.get(name) for name in KEEPERS}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _with_host_copies(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(old)
    def get_batch_from_iterator(data_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        noting = _Noting(data_iterator)
        copying: AbstractContextManager[None] = nullcontext()
        if copies_aside():
            noting.fetch()  # what makes a batch runs as without the plugin, its copies do not
            copying = COPIES.copying()
        with copying:
            batch = old(noting, *args, **kwargs)
        for name, moved in _fields_of(batch).items():
            if name in noting.noted:
                KEEPERS[name].remember(moved, noting.noted[name])
        return batch

    return get_batch_from_iterator


PATCHES = tuple(Patch(entry, _with_host_copies) for entry in SEAMS if entry.target == "get_batch_from_iterator")
