"""One microbatch of a decoder's layers: packed documents, checked before anything touches them, or padded rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...graphs.buckets import Bucket, round_up

# Shapes of padded rows that are recorded: where every microbatch has one of its own, captures would never end.
MOST_SHAPES = 8
# Lengths of padded rows are multiples of it, as Bridge's own padding of samples makes them.
ROW_UNIT = 128
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")
PADDED_OFFSETS = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class PackedBatchError(ValueError):
    """The offsets of a pack do not fit each other or its tokens."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A microbatch for the layers of a decoder.

    Attributes:
        hidden: `[tokens of this rank, 1, width]`; of padded rows `[tokens of each, rows, width]`, without what is
            added to them in a recording.
        angles: `[rows, 1, 1, rotated]` fp32 rotary angles: a row per position, or per token; None without rotation.
            Of padded rows `[tokens of each, rows, 1, rotated]`.
        offsets: The `cu_seqlens` that the batch has, by their name, each `[documents + 1]` int32 without the repeated
            offsets at the end; none of padded rows.
        lengths: Tokens of every document or row, with their padding, on the host.
        tokens: Tokens of all of them, those that other ranks hold included.
        additions: Like `hidden` each, added to the hidden states behind the first layers.
        by_place: Whether the table of angles is taken by the place in the pack; a document's position counts otherwise.
        loaded: Whether a part of the layers has written everything but the hidden states to where all parts read it.
        joint: The shapes of all ranks that must use the same bucket; None where all of them have this pack.
        filled: Whether queries and keys have the same documents, which fill the pack.
        biases: Of attention, each `[rows, 1, tokens of each, tokens of each]`, of the hidden states' dtype.
    """

    hidden: Tensor
    angles: Tensor | None
    offsets: Mapping[str, Tensor]
    lengths: tuple[int, ...]
    tokens: int
    additions: tuple[Tensor, ...] = ()
    by_place: bool = False
    loaded: bool = False
    joint: "JointShape | None" = None
    filled: bool = False
    biases: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> "PackShape | JointShape":
        """What buckets are chosen by."""
        return self.own_shape if self.joint is None else self.joint

    @property
    def each(self) -> "tuple[PackShape, ...]":
        """The shapes that a bucket must take."""
        return self.shape.each

    @property
    def own_shape(self) -> "PackShape":
        """The shape of this rank's pack."""
        rotated = 0 if self.angles is None else self.angles.shape[-1]
        return PackShape(self.tokens, self.lengths, tuple(self.offsets), rotated, (None,) * len(self.additions))

    def of_part(self, hidden: Tensor, loaded: bool) -> "PackedBatch":
        """Return the batch of a part of a layer that is called with these hidden states."""
        return replace(self, hidden=hidden, loaded=loaded)


class PackShape(NamedTuple):
    """A pack's size and kind. Buckets refuse a shape as they refuse the pack; see `PackedBatch`.

    Attributes:
        layout: Which offsets the pack has.
        rotated: Width of a row of rotary angles, 0 without rotation.
    """

    tokens: int
    lengths: tuple[int, ...]
    layout: tuple[str, ...]
    rotated: int
    additions: tuple[None, ...]

    @property
    def each(self) -> "tuple[PackShape, ...]":
        """The shapes that a bucket must take: this one."""
        return (self,)

    @property
    def rows(self) -> Bucket:
        """The only bucket that takes padded rows of this shape, with the limits (rows, tokens of each)."""
        return Bucket(self.tokens, (len(self.lengths), self.lengths[0]))


class JointShape(NamedTuple):
    """The shapes of packs that ranks replay in one bucket; it takes them if it takes each."""

    each: tuple[PackShape, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the largest pack."""
        return max(shape.tokens for shape in self.each)


def pack_batch(
    hidden: Tensor,
    angles: Tensor | None,
    offsets: Mapping[str, Tensor | None],
    max_seqlens: Mapping[str, int],
    host: Callable[[Tensor], Sequence[int]],
    shards: int = 1,
    ranks: int = 1,
) -> PackedBatch:
    """Check a microbatch's offsets and leave out those that only repeat the last.

    Args:
        hidden: `[tokens / (shards * ranks), 1, width]`.
        angles: Rotary angles, if there are any.
        offsets: `cu_seqlens` by name; None where the batch has no padding between documents.
        max_seqlens: Tokens of the longest document by name, as given in the batch.
        host: Returns a small tensor's elements.
        shards: Ranks that hold a part of the tokens each.
        ranks: Ranks that hold two of `2 * ranks` chunks of every document each.

    Raises:
        PackedBatchError: An offset has the wrong type, device, order or end; names it, what it holds and what is right.
    """
    tokens = hidden.shape[0] * shards * ranks
    given = {name: value for name, value in offsets.items() if value is not None}
    values = {name: check_offsets(name, value, tokens, hidden.device, host) for name, value in given.items()}
    counts = {name: len(value) for name, value in values.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise PackedBatchError(f"cu_seqlens have different counts ({listed}): they belong to different packs")
    kept = _used(list(values.values()))
    for short, long in zip(OFFSETS, PADDED_OFFSETS, strict=True):
        _check_pair(short, values.get(short), long, values.get(long))
    physical = {name: values.get(padded, values[name]) for name, padded in zip(OFFSETS, PADDED_OFFSETS, strict=True)}
    for name, value in physical.items():
        if value[-1] == 0:
            raise PackedBatchError(f"{name} holds {value}: the pack is empty; leave such batches out")
        if ranks > 1:
            _check_chunks(name, value, 2 * ranks)
    for name, longest in max_seqlens.items():
        if longest < (actual := max(_lengths(physical[name.replace("max_seqlen", "cu_seqlens")]))):
            raise PackedBatchError(f"{name}={longest}, a document has {actual} tokens: it must be at least that")
    lengths = tuple(max(lengths) for lengths in zip(*map(_lengths, physical.values()), strict=True))
    used = {name: value[:kept] for name, value in given.items()}
    filled = len({*physical.values()}) == 1 and sum(lengths) == tokens
    return PackedBatch(hidden, angles, used, lengths[: kept - 1], tokens, filled=filled)


def row_batch(hidden: Tensor, angles: Tensor | None, room: int, biases: Sequence[Tensor]) -> PackedBatch:
    """Return a microbatch of padded rows, of so many tokens in a recording; further arguments of `PackedBatch`."""
    lengths = (room,) * hidden.shape[1]
    return PackedBatch(hidden, angles, {}, lengths, sum(lengths), biases=tuple(biases))


def row_lengths(longest: int) -> tuple[int, ...]:
    """Return the lengths that rows are padded to, ascending: by less than half of their own where they are long.

    Args:
        longest: Tokens of the longest row that may come.
    """
    halves = [longest / 2**place for place in range(MOST_SHAPES // 2)]
    found = {round_up(math.ceil(each), ROW_UNIT) for half in halves for each in (half, half * 3 / 4)}
    return (*sorted(each for each in found if each < longest), longest)


def check_offsets(
    name: str, offsets: Tensor, tokens: int, device: torch.device, host: Callable[[Tensor], Sequence[int]]
) -> tuple[int, ...]:
    """Return one `cu_seqlens` as host integers.

    Raises:
        PackedBatchError: It cannot be the offsets of a pack of `tokens` tokens.
    """
    if offsets.dtype != torch.int32:
        raise PackedBatchError(f"{name} is {offsets.dtype}: it must be torch.int32, as attention kernels read it")
    if offsets.device != device:
        raise PackedBatchError(f"{name} is on {offsets.device}, the tokens are on {device}: move it there")
    if offsets.dim() != 1 or not offsets.numel():
        raise PackedBatchError(f"{name} has shape {tuple(offsets.shape)}: it must be [documents + 1], one pack a batch")
    values = tuple(host(offsets))
    if values[0] != 0:
        raise PackedBatchError(f"{name} starts at {values[0]}: it must be 0")
    for index, (before, after) in enumerate(pairwise(values)):
        if after < before:
            raise PackedBatchError(f"{name}[{index + 1}]={after} after {before}: offsets must not decrease")
    if values[-1] > tokens:
        raise PackedBatchError(f"{name} ends at {values[-1]}, the pack has {tokens} tokens: it must be at most that")
    return values


def _check_pair(short: str, offsets: Sequence[int] | None, long: str, padded: Sequence[int] | None) -> None:
    if offsets is None or padded is None:
        return
    for index, (length, room) in enumerate(zip(_lengths(offsets), _lengths(padded), strict=True)):
        if length > room:
            raise PackedBatchError(
                f"document {index} has {length} tokens in {short} and room for {room} in {long}: "
                "a document must fit its padding"
            )


def _check_chunks(name: str, offsets: Sequence[int], chunks: int) -> None:
    for index, length in enumerate(_lengths(offsets)):
        if length % chunks:
            raise PackedBatchError(
                f"document {index} has {length} tokens in {name}: it must be a multiple of {chunks}, two chunks for "
                "each rank of context parallelism; pad documents where they are packed"
            )


def _lengths(offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(after - before for before, after in pairwise(offsets))


def _used(offsets: Sequence[Sequence[int]]) -> int:
    """Return how many offsets there are before all that follow repeat the last, in every list."""
    return max(next(i for i, value in enumerate(values) if value == values[-1]) + 1 for values in offsets)


def _positions(offsets: Tensor, document: Tensor, place: Tensor, ranks: int, rank: int) -> Tensor:
    """Return every token's position in its document from the result of `_places`; 0 behind the last offset.

    Each rank holds two of `2 * ranks` equal chunks of every document: the one with its number, counted from the front,
    and the one with its number, counted from the back.
    """
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


def real_rows(batch: PackedBatch, ranks: int, rank: int, shards: int) -> Tensor | None:
    """Return which of a rank's tokens belong to documents, `[rows]` bool; None where all do.

    Eager's attention leaves any value between documents and behind the last one.

    Args:
        batch: The pack.
        ranks: Ranks of context parallelism.
        rank: Which of them this is.
        shards: Ranks that hold a part of the tokens each: with padding, none is known to belong to a document.
    """
    if PADDED_OFFSETS[0] not in batch.offsets and sum(batch.lengths) == batch.tokens:
        return None
    rows = batch.hidden.shape[0]
    if shards > 1:
        return torch.zeros(rows, dtype=torch.bool, device=batch.hidden.device)
    offsets = batch.offsets[OFFSETS[0]].long()
    physical = batch.offsets.get(PADDED_OFFSETS[0], offsets)
    document, place = _places(physical, rows, ranks)
    lengths = torch.cat((offsets.diff(), offsets.new_zeros(1)))
    return _positions(physical, document, place, ranks, rank) < lengths[document]


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


def with_padding(offsets: Tensor, tokens: int) -> Tensor:
    """Return `cu_seqlens` of documents and one more, perhaps empty, of the tokens behind the last offset."""
    return torch.cat((offsets, offsets.new_full((1,), tokens)))


def chunk_offsets(offsets: Tensor, size: int, tokens: int) -> Tensor:
    """Return how many chunks lie before every document, and of all, `[documents + 1]` int64.

    Args:
        offsets: `[documents + 1]` int32, ascending from 0; documents may have no tokens.
        size: Tokens of a chunk, all but a document's last.
        tokens: Where the last document ends, not 0.
    """
    return pad(((offsets.diff() + size - 1) // size).cumsum(0), (1, 0))


def chunk_indices(offsets: Tensor, size: int, tokens: int) -> Tensor:
    """Return every chunk's document, and its place in it, `[most chunks that there can be, 2]`.

    Chunks that there are not lie behind the last document that has tokens: kernels find no token in them. Arguments as
    for `chunk_offsets`.
    """
    before = chunk_offsets(offsets, size, tokens)
    documents = min(offsets.shape[0] - 1, tokens)
    chunk = torch.arange((tokens + documents * (size - 1)) // size, device=offsets.device)
    document = torch.searchsorted(before[1:], torch.minimum(chunk, before[-1:] - 1), right=True)
    return torch.stack((document, chunk - before[document]), 1).to(offsets.dtype)


def spread(mask: Tensor, features: Tensor) -> Tensor:
    """Return features at the tokens that a mask marks, in their order, and zero elsewhere: `[tokens, rows, width]`.

    A gather, so that neither it nor its backward reads the device. Where there are no features it depends on them all
    the same: on other ranks their gradients are summed.

    Args:
        mask: `[rows, tokens]` bool.
        features: `[marked tokens, width]`, row by row.
    """
    if not features.shape[0]:
        return features.new_zeros(mask.shape[1], mask.shape[0], features.shape[1]) + features.sum()
    marked = mask.reshape(-1)
    place = (marked.cumsum(0) - 1).clamp(min=0)
    return torch.where(marked[:, None], features[place], 0).view(*mask.shape, -1).transpose(0, 1)


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
