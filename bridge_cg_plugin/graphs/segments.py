"""Attention segments given by offsets of a fixed count."""

import torch
from torch import Tensor


def write_offsets(buffer: Tensor, offsets: Tensor, end: int | None = None) -> None:
    """Write `cu_seqlens` into a longer buffer.

    Args:
        buffer: `[most segments + 1]` int32.
        offsets: `[segments + 1]`, ascending from 0, same device or host.
        end: What the rest of the buffer holds: a last segment reaches up to there. None repeats the last offset, so
            that all further segments have no length.
    """
    count = offsets.shape[0]
    buffer[:count].copy_(offsets, non_blocking=True)
    if end is None:
        buffer[count:].copy_(buffer[count - 1 : count].expand(buffer.shape[0] - count))
    else:
        buffer[count:].fill_(end)


def fill_one_segment(buffer: Tensor, tokens: int) -> None:
    """Write the offsets of one segment of `tokens` tokens."""
    buffer.fill_(tokens)
    buffer[0].zero_()


def fill_segments(buffer: Tensor, tokens: int, largest: int) -> None:
    """Write the offsets of segments of `largest` tokens, the last one shorter, that are `tokens` together."""
    starts = torch.arange(buffer.shape[0], dtype=buffer.dtype, device=buffer.device) * largest
    buffer.copy_(starts.clamp(max=tokens))
    buffer[-1].fill_(tokens)
