"""Reads of a batch by Qwen3-VL's forward, ahead of its encoder.

Bridge's own step has a batch on the host. Other loops give the model tensors of the device, which upstream reads one by
one, mostly behind the encoder, so that the host waits for it. Read first, they cost one short wait.

Such a loop may write to its tensors by means that PyTorch does not count. So what was read is forgotten when the
forward returns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....graphs.host_copies import HostTensors
from ....language.packed.batch import OFFSETS, PADDED_OFFSETS
from ...host_batch import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from ...seams.registry import seam
from ..helpers.graph_helper import active_helpers, any_on_graphs
from ..helpers.packed_helper import DecoderHelper
from .between import GRID_NAMES, is_mask_of, mask_on_host
from .packed_rows import forget_rows

BATCH = seam("batch_of_model")
Forget = Callable[[], None]


class EarlyReads:
    """Lets a Qwen3-VL model read its batch first; any other model is left alone.

    Args:
        holder: The module that holds the vision model and the language model.
    """

    def __init__(self, holder: nn.Module) -> None:
        self._forget: list[Forget] = []
        mine = any(kind.__module__ == BATCH.module for kind in type(holder).__mro__)
        self._handles = (
            [
                holder.register_forward_pre_hook(self._began, with_kwargs=True),
                holder.register_forward_hook(self._ended, always_call=True),
            ]
            if mine
            else []
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _began(self, holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any_on_graphs():
            self._forget += read_ahead(kwargs if not args else {"input_ids": args[0], **kwargs})

    def _ended(self, *unused: Any) -> None:
        for forget in self._forget:
            forget()
        self._forget = []


def read_ahead(call: Mapping[str, Any]) -> list[Forget]:
    """Read what upstream would read of a call's batch, unless the host knows it.

    Args:
        call: Arguments of the forward, by name.

    Returns:
        What forgets tokens and mask that were read; sizes are kept as those of any batch.
    """
    tokens, mask, params = (call.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.is_contiguous():
        return []
    grids = [call[name] for name in GRID_NAMES if isinstance(call.get(name), Tensor)]
    padded = params is not None and len(tokens) > 1
    if not (grids or padded) or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    forget = [] if TOKENS.known(tokens) is not None else [_read(TOKENS, tokens)]
    # Releases before 0.6.2 pack a single sample by its mask, too.
    if params is not None and is_mask_of(mask, tokens) and mask.is_contiguous() and mask_on_host(tokens, mask) is None:
        forget += [_read(KEPT, mask), lambda: forget_rows(mask)]
    for grid in grids:
        GRIDS.values(grid)
    if params is not None and (not padded or any(isinstance(each, DecoderHelper) for each in active_helpers())):
        for name in (*OFFSETS, *PADDED_OFFSETS):
            if isinstance(value := getattr(params, name, None), Tensor):
                PACK_OFFSETS.values(value)
    return forget


def _read(copies: HostTensors, tensor: Tensor) -> Forget:
    copies.remember(tensor, tensor.cpu())
    return lambda: copies.forget(tensor)
