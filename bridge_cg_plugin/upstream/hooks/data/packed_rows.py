"""Packs of padded samples: which rows of a batch a pack has, computed once on the host for all tensors of a microbatch.

Upstream asks the device for each tensor, sample by sample, behind the encoder that still computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....graphs.host_copies import ByStorage, on_device
from .host_tokens import params_on_device

Packing = Callable[[Tensor, Tensor, bool, Any], tuple[Tensor, Any]]
# Tensor-parallel and context-parallel ranks, which of the latter this is, and the shape of the batch.
Layout = tuple[int, int, int, torch.Size]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where a rank's rows of a pack come from.

    Attributes:
        layout: For which batch and rank.
        host: Rows of the flattened batch, int64 `[rows]`; -1 where alignment adds one of zeros.
        places: The same on the device, 0 in place of -1.
        empty: bool `[rows]` on the device, the rows of zeros; None without any.
        params: Upstream's description of the pack.
    """

    layout: Layout
    host: Tensor
    places: Tensor
    empty: Tensor | None
    params: Any

    def of(self, values: Tensor) -> Tensor:
        """Return the pack's rows, `[1, rows, ...]`, of `[samples, length, ...]`."""
        rows = values.flatten(0, 1).index_select(0, self.places)
        if self.empty is not None:
            rows = rows.masked_fill(self.empty.view(-1, *[1] * (rows.dim() - 1)), 0)
        return rows[None]

    def of_host(self, values: Tensor) -> Tensor:
        """Return what `of` does, of a host tensor."""
        return values.flatten(0, 1)[self.host.clamp(min=0)].masked_fill(self.host < 0, 0)[None]


# By the mask that keeps a batch's tokens.
_ROWS: ByStorage[PackedRows] = ByStorage(8)


def packed_rows(old: Packing, mask: Tensor, on_host: Tensor, groups: Any) -> PackedRows | None:
    """Return the rows that upstream's own code takes; None where it takes one twice, as it does of short samples.

    Args:
        old: Upstream's function.
        mask: bool `[samples, length]`, the tokens that are kept.
        on_host: The same on the host.
        groups: Process groups, `tp` and `cp`.
    """
    layout = (groups.tp.size(), groups.cp.size(), groups.cp.rank(), mask.shape)
    found = _ROWS.find(mask)
    if found is not None and found.layout == layout and _usable(found.places):
        return found
    numbers = torch.arange(1, on_host.numel() + 1, device="cpu").view(on_host.shape)
    packed, params = old(numbers, on_host, True, groups)
    rows = packed[0] - 1
    taken = rows[rows.numpy() >= 0].numpy()
    if len(set(taken.tolist())) < len(taken):
        return None
    made = _on_device(layout, rows, params, mask.device)
    _ROWS.store(mask, made)
    return made


def forget_rows(mask: Tensor) -> None:
    """Keep nothing for a mask any more."""
    _ROWS.forget(mask)


def _usable(places: Tensor) -> bool:
    """Whether autograd may save indices, which it may not if they were made for inference."""
    return torch.is_inference_mode_enabled() or not places.is_inference()


def _on_device(layout: Layout, rows: Tensor, params: Any, device: torch.device) -> PackedRows:
    missing = rows < 0
    empty = on_device(missing, device) if bool(missing.numpy().any()) else None
    return PackedRows(layout, rows, on_device(rows.clamp(min=0), device), empty, params_on_device(params, device))
