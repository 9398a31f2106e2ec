"""Reads of a batch by Qwen3-VL's forward, ahead of its encoder.

Bridge's own step has a batch on the host. Other loops give the model tensors of the device, which upstream reads one by
one, mostly behind the encoder, so that the host waits for it. Read first, they cost one short wait.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..host_batch import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from ..seams.registry import seam
from .between import GRID_NAMES, mask_on_host
from .graph_helper import any_on_graphs

BATCH = seam("batch_of_model")


class EarlyReads:
    """Lets a Qwen3-VL model read its batch first; any other model is left alone.

    Args:
        holder: The module that holds the vision model and the language model.
    """

    def __init__(self, holder: nn.Module) -> None:
        mine = any(kind.__module__ == BATCH.module for kind in type(holder).__mro__)
        self._handle = holder.register_forward_pre_hook(_began, with_kwargs=True) if mine else None

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()


def _began(holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any_on_graphs():
        read_ahead(kwargs if not args else {"input_ids": args[0], **kwargs})


def read_ahead(call: Mapping[str, Any]) -> None:
    """Read what upstream would read of a call's batch, unless the host knows it.

    Args:
        call: Arguments of the forward, by name.
    """
    tokens, mask, params = (call.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.is_contiguous():
        return
    grids = [call[name] for name in GRID_NAMES if isinstance(call.get(name), Tensor)]
    padded = params is not None and len(tokens) > 1
    if not (grids or padded) or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if TOKENS.known(tokens) is None:
        TOKENS.remember(tokens, tokens.cpu())
    if padded and _is_mask(mask) and mask_on_host(tokens, mask) is None:
        KEPT.remember(mask, mask.cpu())
    for grid in grids:
        GRIDS.values(grid)
    for value in vars(params).values() if params is not None else ():
        if isinstance(value, Tensor):
            PACK_OFFSETS.values(value)


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.is_contiguous()
