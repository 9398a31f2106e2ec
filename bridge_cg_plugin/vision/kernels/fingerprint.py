"""A 128-bit number that stands for the content of tensors, computed where they are."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

# Splitmix64's increment and multipliers (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SEEDS = (0, 0xD6E8FEB86659FD93)
_MODULUS, _SIGN = 1 << 64, 1 << 63
WORD_BYTES = 4
# Words that PyTorch's own operations mix at a time, that a program of the kernel mixes, and those of each of its turns.
CHUNK, PIECE, BLOCK = 1 << 20, 1 << 18, 2048


# The two sums, as signed numbers.
Fingerprint = tuple[int, int]


class Piece(NamedTuple):
    """A piece of memory on a GPU.

    Attributes:
        address: Of the first word.
        words: How many there are.
        place: Of the first word among those of all tensors.
    """

    address: int
    words: int
    place: int


def fingerprint(tensors: Iterable[Tensor]) -> Fingerprint:
    """Return two sums, modulo 2**64, of every 32-bit word mixed with its place by splitmix64's finalizer.

    Tensors with other bits, or the same ones in another order, have another fingerprint but for a chance of about
    2**-128. Shapes and types are not part of it. On a GPU one kernel reads all tensors. The host waits once for each
    device.

    Args:
        tensors: Any shapes and types, anywhere.
    """
    return begun(tensors)()


def begun(tensors: Iterable[Tensor]) -> Callable[[], Fingerprint]:
    """Return what waits for a fingerprint and returns it; the GPU takes it of what the tensors hold now.

    Args:
        tensors: See `fingerprint`.
    """
    sums = [torch.zeros(len(SEEDS), dtype=torch.int64, device="cpu")]
    pieces: dict[torch.device, list[Piece]] = {}
    held, place = [], 0  # copies stay until a kernel that reads them is launched
    for tensor in tensors:
        words = tensor if tensor.is_cuda and _is_words(tensor) else _words(tensor)
        count = words.nbytes // WORD_BYTES
        if count and words.is_cuda:
            held.append(words)
            pieces.setdefault(words.device, []).extend(_pieces(words.data_ptr(), count, place))
        elif count:
            add(sums[0], words, place)
        place += count + 1
    for device, found in pieces.items():
        sums.append(torch.zeros(len(SEEDS), dtype=torch.int64, device=device))
        add_by_kernel(sums[-1], found)

    def result() -> Fingerprint:
        first, second = map(sum, zip(*(each.tolist() for each in sums), strict=True))
        return signed(first), signed(second)

    return result


def _is_words(tensor: Tensor) -> bool:
    """Whether a tensor's memory is its values in their order, in whole words that begin where a GPU can read some."""
    return tensor.is_contiguous() and not (tensor.nbytes % WORD_BYTES or tensor.data_ptr() % WORD_BYTES)


def _pieces(address: int, count: int, place: int) -> Iterator[Piece]:
    for begin in range(0, count, PIECE):
        yield Piece(address + begin * WORD_BYTES, min(PIECE, count - begin), place + begin)


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as int32, behind the last ones zeros."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -plain.numel() % WORD_BYTES:
        plain = torch.nn.functional.pad(plain, (0, missing))
    elif not _is_words(plain):
        plain = plain.clone()
    return plain.view(torch.int32)


def add(sums: Tensor, words: Tensor, place: int) -> None:
    """Add what words contribute, by PyTorch's operations.

    Args:
        sums: `[2]` int64.
        words: `[n]` int32.
        place: Of the first word.
    """
    for begin in range(0, words.numel(), CHUNK):
        chunk = words[begin : begin + CHUNK].long()
        places = torch.arange(begin, begin + chunk.numel(), device=words.device) + place
        for index, seed in enumerate(SEEDS):
            mixed = (places * signed(STEP) + signed(seed)) ^ chunk
            mixed = (mixed ^ _shifted(mixed, 30)) * signed(FIRST)
            mixed = (mixed ^ _shifted(mixed, 27)) * signed(SECOND)
            sums[index] += (mixed ^ _shifted(mixed, 31)).sum()


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return values shifted to the right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    """Return the 64-bit number with these bits that has a sign."""
    return (number + _SIGN) % _MODULUS - _SIGN


def add_by_kernel(sums: Tensor, pieces: Sequence[Piece]) -> None:
    """Do what `add` does for all pieces, in one kernel.

    Args:
        sums: `[2]` int64.
        pieces: Of memory on its device.
    """
    # PyTorch reads one list a hundred times as fast as rows of it: weights are more than a thousand pieces.
    table = torch.tensor(list(chain.from_iterable(pieces)), device="cpu").to(sums.device, non_blocking=True)
    constants = {"STEP": signed(STEP), "FIRST": signed(FIRST), "SECOND": signed(SECOND)}
    first, second = map(signed, SEEDS)
    launch(_add_pieces, (len(pieces),), sums, table, SEED0=first, SEED1=second, BLOCK=BLOCK, **constants)


@triton.jit
def _add_pieces(
    sums,
    pieces,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SEED0: tl.constexpr,
    SEED1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = pieces + tl.program_id(0) * 3
    words = tl.load(piece).to(tl.pointer_type(tl.int32))
    count, place = tl.load(piece + 1), tl.load(piece + 2)
    first = tl.zeros([BLOCK], tl.int64)
    second = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        word = tl.load(words + at, mask=inside, other=0).to(tl.int64)
        begun = (at + place) * STEP
        first += tl.where(inside, _mixed((begun + SEED0) ^ word, FIRST, SECOND), 0)
        second += tl.where(inside, _mixed((begun + SEED1) ^ word, FIRST, SECOND), 0)
    tl.atomic_add(sums, tl.sum(first))
    tl.atomic_add(sums + 1, tl.sum(second))


@triton.jit
def _mixed(values, FIRST: tl.constexpr, SECOND: tl.constexpr):
    values = values.to(tl.uint64, bitcast=True)
    values = (values ^ (values >> 30)) * tl.cast(FIRST, tl.uint64, bitcast=True)
    values = (values ^ (values >> 27)) * tl.cast(SECOND, tl.uint64, bitcast=True)
    return (values ^ (values >> 31)).to(tl.int64, bitcast=True)
