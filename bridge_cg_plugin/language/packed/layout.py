"""From `cu_seqlens` to every token's position, on the device.

Everything here has a fixed output shape and reads nothing on the host, so it can be part of a graph.
"""

import torch
from torch import Tensor


def token_positions(offsets: Tensor, rows: int, ranks: int = 1, rank: int = 0) -> Tensor:
    """Return every token's position in its document, `[rows]` int64; 0 for tokens behind the last offset.

    Args:
        offsets: `[documents + 1]` int32, ascending from 0; documents may have no tokens.
        rows: Tokens of the padded pack on this rank.
        ranks: Ranks of context parallelism. Each holds two of `2 * ranks` equal chunks of every document: the one with
            its number, counted from the front, and the one with its number, counted from the back.
        rank: Which of them this is.
    """
    return _positions(offsets, *_places(offsets, rows, ranks), ranks, rank)


def _positions(offsets: Tensor, document: Tensor, place: Tensor, ranks: int, rank: int) -> Tensor:
    """Return every token's position in its document from the result of `_places`."""
    if ranks > 1:
        chunk = torch.cat((offsets.long().diff(), offsets.new_zeros(1)))[document] // (2 * ranks)
        place = torch.where(place < chunk, rank * chunk + place, (2 * ranks - rank - 2) * chunk + place)
    return torch.where(document < offsets.shape[0] - 1, place, 0)


def _places(offsets: Tensor, rows: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return every token's document, and its place in what this rank holds of it, each `[rows]` int64.

    Tokens behind the last offset have a document of their own, behind all others.
    """
    token = torch.arange(rows, device=offsets.device)
    starts = offsets.long() // ranks
    document = torch.searchsorted(starts[1:], token, right=True)
    return document, token - starts[document]


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


def token_angles(table: Tensor, by_place: Tensor, offsets: Tensor, ranks: int = 1, rank: int = 0) -> Tensor:
    """Return every token's rotary angles, `[capacity / ranks, 1, 1, width]`, from a table with one row per position.

    Args:
        table: `[capacity, 1, 1, width]` angles; rows that the batch's own table did not have are zero.
        by_place: `[1]` bool, whether the table goes by the place in the pack; a document's position counts otherwise.
        offsets: `[documents + 1]` int32 of documents with their padding.
        ranks: Ranks of context parallelism.
        rank: Which of them this is.
    """
    document, place = _places(offsets, table.shape[0] // ranks, ranks)
    positions = _positions(offsets, document, place, ranks, rank)
    starts = torch.where(document < offsets.shape[0] - 1, offsets.long()[document], 0)
    return table[positions + torch.where(by_place, starts, 0)]
