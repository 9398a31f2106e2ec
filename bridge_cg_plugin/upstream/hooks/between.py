"""Between Qwen3-VL's encoder and its language model, without waiting for the device.

Where the host knows the token ids, upstream's own functions run on these and on the host's copies of grids and masks,
and what they give goes to the device. Otherwise they run as upstream calls them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...graphs.host_copies import on_device
from ...vision.known_mask import KnownMask
from ..seams.patches import Patch
from ..seams.registry import seam
from .host_tokens import TOKENS, on_graphs
from .vision_helper import GRIDS

Function = Callable[..., Any]
GRID_NAMES = ("image_grid_thw", "video_grid_thw")


def _ids_on_host(tokens: Any) -> Tensor | None:
    return TOKENS.known(tokens) if on_graphs() and isinstance(tokens, Tensor) else None


def _on_host(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments with host copies of its tokens and grids; None where the host lacks one."""
    copies = {"input_ids": _ids_on_host(call.get("input_ids"))}
    copies |= {name: _grid_on_host(call[name]) for name in GRID_NAMES if call.get(name) is not None}
    return None if any(copy is None for copy in copies.values()) else {**call, **copies}


def _grid_on_host(grid: Tensor) -> Tensor | None:
    known = GRIDS.known(grid)
    return None if known is None else torch.tensor(known, dtype=grid.dtype).view(grid.shape)


def _image_tokens_on_host(old: Function) -> Function:
    """Find the places of images in the text on the host."""
    signature = inspect.signature(old)

    @functools.wraps(old)
    def reorganize_inputs(*args: Any, **kwargs: Any) -> Any:
        call = dict(signature.bind(*args, **kwargs).arguments)
        masked = call.get("image_input_mask") is not None or call.get("video_input_mask") is not None
        host = None if masked else _on_host(call)
        if host is None:
            return old(*args, **kwargs)
        device = call["input_ids"].device
        values, grid, mask = old(**host)
        return values, _given(grid, host, call, device), None if mask is None else _known(mask, device)

    return reorganize_inputs


def _given(grid: Tensor | None, host: dict[str, Any], call: dict[str, Any], device: torch.device) -> Tensor | None:
    """Return the device's tensor for a grid of the host: one of the call's, or a new one that mixes them."""
    for name in GRID_NAMES:
        if grid is host.get(name):
            return call.get(name)
    assert grid is not None
    mixed = on_device(grid, device)
    GRIDS.remember(mixed, grid)
    return mixed


def _known(mask: Tensor, device: torch.device) -> KnownMask:
    return KnownMask(on_device(mask, device), mask)


def _parts_on_host(old: Function) -> Function:
    """Count on the host how many image features each tensor-parallel and context-parallel rank has."""

    @functools.wraps(old)
    def split_deepstack_embs(visual_pos_masks: Any, deepstack_visual_embeds: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(visual_pos_masks, KnownMask) and visual_pos_masks.current):
            return old(visual_pos_masks, deepstack_visual_embeds, *args, **kwargs)
        part, features = old(visual_pos_masks.host, deepstack_visual_embeds, *args, **kwargs)
        unsplit = part is visual_pos_masks.host
        return visual_pos_masks if unsplit else _known(part, visual_pos_masks.device), features

    return split_deepstack_embs


PATCHES = (
    Patch(seam("image_tokens"), _image_tokens_on_host),
    Patch(seam("deepstack_parts"), _parts_on_host),
)
