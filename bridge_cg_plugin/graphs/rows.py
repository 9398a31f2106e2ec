"""Real rows at the head of buffers that have room for more.

Each call of PyTorch costs the host several microseconds before anything runs, so several tensors go in one where they
can, and nothing is called for rows that are not there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def leading(tensor: Tensor, count: int) -> Tensor:
    """Return the first `count` rows; the tensor itself where these are all."""
    return tensor if count == tensor.shape[0] else tensor[:count]


def write_rows(buffer: Tensor, rows: Tensor) -> None:
    """Write all rows into the first of a buffer, converted to its dtype, and zero the rest."""
    count = rows.shape[0]
    leading(buffer, count).copy_(rows, non_blocking=True)
    if count < buffer.shape[0]:
        buffer[count:].zero_()


def write_each(buffers: Sequence[Tensor], rows: Sequence[Tensor | None]) -> None:
    """Write the rows of each tensor into the first of its buffer and zero the rest, all of it where there is no tensor.

    One kernel copies all of one dtype and device, one zeroes.
    """
    to, of, unused = [], [], []
    for buffer, tensor in zip(buffers, rows, strict=True):
        count = 0 if tensor is None else tensor.shape[0]
        if tensor is not None:
            to.append(leading(buffer, count))
            of.append(tensor)
        if count < buffer.shape[0]:
            unused.append(buffer[count:])
    _copy(to, of)
    if unused:
        torch._foreach_zero_(unused)


def copies(tensors: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return copies of the first rows of each tensor, made by one kernel for all of one dtype and device."""
    rows = [leading(tensor, count) for tensor, count in zip(tensors, counts, strict=True)]
    if len(rows) == 1:
        return (rows[0].clone(),)
    made = list(map(torch.empty_like, rows))
    _copy(made, rows)
    return tuple(made)


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    if len(to) > 1:
        torch._foreach_copy_(to, of)
    elif to:
        to[0].copy_(of[0])


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


def fill_segments(buffer: Tensor, tokens: int, largest: int) -> None:
    """Write the offsets of segments of `largest` tokens, the last one shorter, that are `tokens` together."""
    starts = torch.arange(buffer.shape[0], dtype=buffer.dtype, device=buffer.device) * largest
    buffer.copy_(starts.clamp(max=tokens))
    buffer[-1].fill_(tokens)
