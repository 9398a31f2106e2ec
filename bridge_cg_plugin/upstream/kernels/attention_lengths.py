"""Backward of unpacked attention whose lengths the device computes, where a replay would read them from the host.

Up to cuDNN 9.15.0, cudnn-frontend hides keys behind the last multiple of 128 by a padding mask of its own, and copies
the lengths for it from host memory in every backward. A replay repeats the copy after that memory is gone. Transformer
Engine's padding mask over full sequences runs the same kernels, with lengths that are on the device.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..attributes import overridden
from ..seams.registry import seam

BACKWARD, VERSION = seam("attention_backward"), seam("engine_cudnn_version")
CUDNN_WITH_HOST_COPIES, KEYS = (9, 15, 0), 128
# Transformer Engine's names of masks -> the one that hides padding as well.
PADDED = {
    "no_mask": "padding",
    "causal": "padding_causal",
    "causal_bottom_right": "padding_causal_bottom_right",
}


@contextmanager
def device_lengths() -> Iterator[None]:
    """Let a recorded backward of unpacked attention mask padding behind full sequences, where cuDNN is that old."""
    if not _copies_lengths():
        yield
        return
    backends = importlib.import_module(BACKWARD.module)
    with overridden(backends, BACKWARD.target, _with_lengths(getattr(backends, BACKWARD.target))):
        yield


def _copies_lengths() -> bool:
    """Whether Transformer Engine's cuDNN, which need not be PyTorch's, copies lengths from the host."""
    if not torch.cuda.is_available():
        return False
    version: tuple[int, ...] = getattr(importlib.import_module(VERSION.module), VERSION.target)()
    return version <= CUDNN_WITH_HOST_COPIES


def _with_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fused_attn_bwd(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        mask = PADDED.get(given.get("attn_mask_type", ""))
        if mask is not None and given["max_seqlen_kv"] % KEYS:
            given["attn_mask_type"] = mask
            for side in ("q", "kv"):
                given[f"cu_seqlens_{side}"] = _full(given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"])
        return original(*call.args, **call.kwargs)

    return fused_attn_bwd


def _full(offsets: Tensor, tokens: int) -> Tensor:
    """Return the offsets of sequences of so many tokens each; the graph computes them in memory of its own."""
    return torch.arange(0, offsets.numel() * tokens, tokens, dtype=offsets.dtype, device=offsets.device)
