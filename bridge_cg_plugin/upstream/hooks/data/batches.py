"""Bridge's batch steps: grids, packs' offsets and token ids are noted on the host before they go to the device.

Where graphs are on they go there on a stream of their own.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ....language.packed.batch import OFFSETS, PADDED_OFFSETS
from ...host_batch import GRIDS, PACK_OFFSETS, TOKENS
from ...seams.patches import Patch
from ...seams.registry import SEAMS
from ..helpers.graph_helper import any_on_graphs
from .batch_copies import CopyStream, copies_aside

GRID_FIELDS = ("image_grid_thw", "video_grid_thw", "image_sizes")
TOKEN_FIELDS = ("tokens", "input_ids")
# Today's names, then those of older batches.
OFFSET_FIELDS = (*OFFSETS, *PADDED_OFFSETS, "cu_seqlens", "cu_seqlens_unpadded")
COPIES = CopyStream()


class _Noting:
    """Passes an iterator through and keeps the host tensors of the last batch that the host must know later."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.grids: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        self.tokens: dict[str, Tensor] = {}
        self._fetched: list[Any] = []

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
        visual = batch.get("visual_inputs") if isinstance(batch, dict) else None
        self.grids = _on_host({name: getattr(visual, name, None) for name in GRID_FIELDS})
        fields = batch if isinstance(batch, dict) else {}
        self.offsets = _on_host({name: fields.get(name) for name in OFFSET_FIELDS})
        self.tokens = _on_host({name: fields.get(name) for name in TOKEN_FIELDS}) if any_on_graphs() else {}
        return batch


def _on_host(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.device.type == "cpu"}


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
        for name, host in noting.grids.items():
            device = getattr(batch.get("visual_inputs"), name, None)
            if device is not None:
                GRIDS.remember(device, host)
        for name, host in noting.offsets.items():
            device = batch.get(name)
            if isinstance(device, Tensor):
                PACK_OFFSETS.remember(device, host)
        for name, host in noting.tokens.items():
            device = batch.get(name)
            if isinstance(device, Tensor):
                TOKENS.remember(device, host)
        return batch

    return get_batch_from_iterator


PATCHES = tuple(Patch(entry, _with_host_copies) for entry in SEAMS if entry.target == "get_batch_from_iterator")
