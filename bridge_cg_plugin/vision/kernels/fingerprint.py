"""A 128-bit number that stands for the content of tensors, computed where they are."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

# Splitmix64's increment and multipliers (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SEEDS = (0, 0xD6E8FEB86659FD93)
_MODULUS, _SIGN = 1 << 64, 1 << 63
# Words that a program of the kernel mixes, and that PyTorch's own operations mix at a time.
BLOCK, CHUNK = 4096, 1 << 20


def fingerprint(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Return two sums, modulo 2**64, of every 32-bit word mixed with its place by splitmix64's finalizer.

    Tensors with other bits, or the same ones in another order, have another fingerprint but for a chance of about
    2**-128. Shapes and types are not part of it. The host waits once for each
    device.

    Args:
        tensors: Any shapes and types, anywhere.
    """
    sums: dict[torch.device, Tensor] = {}
    place = 0
    for tensor in tensors:
        words = _words(tensor)
        if words.device not in sums:
            sums[words.device] = torch.zeros(len(SEEDS), dtype=torch.int64, device=words.device)
        if words.numel():
            (add_by_kernel if words.is_cuda else add)(sums[words.device], words, place)
        place += words.numel() + 1
    first, second = map(sum, zip(*(each.tolist() for each in sums.values()), strict=True)) if sums else (0, 0)
    return signed(first), signed(second)


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as int32, behind the last ones zeros."""
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -plain.numel() % 4
    return (torch.nn.functional.pad(plain, (0, missing)) if missing else plain).view(torch.int32)


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


def add_by_kernel(sums: Tensor, words: Tensor, place: int) -> None:
    """Do what `add` does in one kernel."""
    grid = (triton.cdiv(words.numel(), BLOCK),)
    constants = {"STEP": signed(STEP), "FIRST": signed(FIRST), "SECOND": signed(SECOND)}
    first, second = map(signed, SEEDS)
    launch(_add_words, grid, sums, words, words.numel(), place, SEED0=first, SEED1=second, BLOCK=BLOCK, **constants)


@triton.jit(do_not_specialize=["count", "place"])
def _add_words(
    sums,
    words,
    count,
    place,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SEED0: tl.constexpr,
    SEED1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    word = tl.load(words + at, mask=inside, other=0).to(tl.int64)
    begun = (at + place) * STEP
    tl.atomic_add(sums, tl.sum(tl.where(inside, _mixed((begun + SEED0) ^ word, FIRST, SECOND), 0)))
    tl.atomic_add(sums + 1, tl.sum(tl.where(inside, _mixed((begun + SEED1) ^ word, FIRST, SECOND), 0)))


@triton.jit
def _mixed(values, FIRST: tl.constexpr, SECOND: tl.constexpr):
    values = values.to(tl.uint64, bitcast=True)
    values = (values ^ (values >> 30)) * tl.cast(FIRST, tl.uint64, bitcast=True)
    values = (values ^ (values >> 27)) * tl.cast(SECOND, tl.uint64, bitcast=True)
    return (values ^ (values >> 31)).to(tl.int64, bitcast=True)
