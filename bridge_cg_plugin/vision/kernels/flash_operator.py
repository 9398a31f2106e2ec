"""PyTorch's operator of flash attention."""

import torch
from torch import Tensor


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor | None, largest: int, scale: float
) -> tuple[Tensor, ...]:
    """Return output and logsumexp of PyTorch's flash attention, and what its backward takes besides.

    Args:
        query, key, value: `[tokens, heads, width]`, or `[1, tokens, heads, width]` without offsets.
        offsets: `[segments + 1]` int32 `cu_seqlens`; None attends to all tokens.
        largest: Bound of a segment's length, or all tokens.
        scale: What the products of queries and keys are multiplied by.
    """
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query, key, value, offsets, offsets, largest, largest, 0.0, False, False, scale=scale
    )
    return found
