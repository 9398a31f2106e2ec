"""Attention segments given by offsets of a fixed count."""

from torch import Tensor


def write_offsets(buffer: Tensor, offsets: Tensor) -> None:
    """Write `cu_seqlens` into a longer buffer; the rest repeats the last offset, so it is segments of no length.

    Args:
        buffer: `[most segments + 1]` int32.
        offsets: `[segments + 1]`, ascending from 0, same device or host.
    """
    count = offsets.shape[0]
    buffer[:count].copy_(offsets, non_blocking=True)
    buffer[count:].copy_(buffer[count - 1 : count].expand(buffer.shape[0] - count))


def fill_one_segment(buffer: Tensor, tokens: int) -> None:
    """Write the offsets of one segment of `tokens` tokens."""
    buffer.fill_(tokens)
    buffer[0].zero_()
