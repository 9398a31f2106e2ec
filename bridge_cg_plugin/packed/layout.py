"""From `cu_seqlens` to every token's position, on the device.

Everything here has a fixed output shape and reads nothing on the host, so it can be part of a graph.
"""

import torch
from torch import Tensor


def token_positions(offsets: Tensor, capacity: int) -> Tensor:
    """Return every token's position in its document, `[capacity]` int64; 0 for tokens behind the last offset.

    Args:
        offsets: `[documents + 1]` int32, ascending from 0; documents may have no tokens.
        capacity: Tokens of the padded pack.
    """
    token = torch.arange(capacity, device=offsets.device)
    ends = offsets[1:].long()
    document = torch.searchsorted(ends, token, right=True)
    start = offsets.long()[document]
    return torch.where(token < ends[-1], token - start, 0)


def document_indices(offsets: Tensor, tokens: int) -> Tensor:
    """Return every token's document by number, `[1, tokens]` int32, as megatron-core's Mamba layers take it.

    Tokens behind the last offset have a number of their own; so a state never goes from a document to another, nor to
    padding. Documents of no tokens leave a number out, which changes nothing: only equality counts.

    Args:
        offsets: `[documents + 1]` int32, ascending from 0; documents may have no tokens.
        tokens: Tokens of the pack, with its padding.
    """
    token = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], token, right=True, out_int32=True)[None]


def spread(mask: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` at the tokens that a mask marks, in their order, and zero elsewhere: `[tokens, 1, width]`.

    A gather, so that neither it nor its backward reads the device.

    Args:
        mask: `[1, tokens]` bool.
        rows: `[marked tokens, width]`.
    """
    marked = mask.reshape(-1)
    if not rows.shape[0]:
        return rows.new_zeros(marked.shape[0], 1, rows.shape[1])
    place = (marked.cumsum(0) - 1).clamp(min=0)
    return torch.where(marked[:, None], rows[place], 0)[:, None]


def token_angles(table: Tensor, rows: Tensor, offsets: Tensor, absolute: bool) -> Tensor:
    """Return every token's rotary angles, `[capacity, 1, 1, width]`, from a table with one row per position.

    Args:
        table: `[capacity, 1, 1, width]` angles; rows that the batch's own table did not have are zero.
        rows: `[1]` int64, rows of the batch's own table.
        offsets: `[documents + 1]` int32 of documents with their padding.
        absolute: Whether a table of exactly as many rows as the pack has tokens goes by the place in the pack, as
            megatron-core takes it without its fused kernel; a document's position counts otherwise.
    """
    capacity = table.shape[0]
    positions = token_positions(offsets, capacity)
    if absolute:
        token = torch.arange(capacity, device=offsets.device)
        inside = token < offsets[-1]
        positions = torch.where((rows == offsets[-1]) & inside, token, positions)
    return table[positions]
