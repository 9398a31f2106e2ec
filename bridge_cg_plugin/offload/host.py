"""Page-locked host memory: how much a process may take, taken once, given back."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..graphs.buckets import round_up
from ..graphs.errors import CaptureError, first_line
from .plan import OWN_NAMES

GIB = 2**30
# What other allocations of the host, page cache aside, are left.
SHARE = 0.8
# PyTorch's allocator of page-locked memory rounds up to powers of two: pieces of such sizes waste nothing.
PIECE = GIB
ALIGNMENT = 512
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class HostMemoryError(CaptureError):
    """The host has too little memory for what is to be offloaded."""


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return how much memory the host, or this process's control group, can still give, in bytes."""
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    limits = [int(line.split()[1]) * 1024]
    for most, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        if (cgroup / most).exists() and (most_text := (cgroup / most).read_text().strip()) != "max":
            in_use = int((cgroup / used).read_text()) - _reclaimable(cgroup / statistics)
            limits.append(int(most_text) - in_use)
    return max(min(limits), 0)


def _reclaimable(statistics: Path) -> int:
    """Return the bytes of files that a control group would give up."""
    if not statistics.exists():
        return 0
    pairs = dict(line.split()[:2] for line in statistics.read_text().splitlines())
    return int(pairs.get("inactive_file", pairs.get("total_inactive_file", 0)))


def processes_here() -> int:
    """Return how many processes of this run share the host, as launchers say it."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        given = os.environ.get(name, "")
        if given.isdecimal() and int(given) > 0:
            return int(given)
    return 1


class PinnedMemory:
    """Page-locked memory of one process, a part for each slot; a slot's buckets share it.

    Args:
        page_locked: Whether to lock it; without a GPU there is nothing to lock it for.
        fields: Option -> the name that users know it by, for messages.
    """

    def __init__(self, page_locked: bool, fields: Mapping[str, str] = OWN_NAMES) -> None:
        self._page_locked, self._fields = page_locked, fields
        self._pieces: dict[int, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    def check(self, more: int) -> None:
        """Make sure that so many bytes can be taken.

        Raises:
            HostMemoryError: They cannot.
        """
        host = int(available_bytes() * SHARE / processes_here())
        if more > host:
            raise HostMemoryError(
                f"activations to offload take {more / GIB:.1f} GiB of host memory, the host has {host / GIB:.1f} GiB "
                f"for this process ({SHARE:.0%} of what is available, shared by the run's {processes_here()} processes "
                f"there); offload less with {self._fields['offload']}, recompute with {self._fields['recompute']}, or "
                "take fewer slots"
            )

    def reserve[Key](self, slot: int, sizes: Mapping[Key, int]) -> dict[Key, Tensor]:
        """Return `[size]` uint8 host memory of a slot under every key; what the slot has is used again.

        Raises:
            HostMemoryError: The host has too little.
        """
        pieces = self._pieces.setdefault(slot, [])
        places, lengths = _places(list(sizes.values()), [piece.nbytes for piece in pieces])
        fresh = lengths[len(pieces) :]
        self.check(sum(fresh))
        for size in fresh:
            pieces.append(self._take(size))
        found = zip(sizes.items(), places, strict=True)
        return {key: pieces[piece][start : start + size] for (key, size), (piece, start) in found}

    def _take(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the host refused {size / GIB:.2f} GiB of page-locked memory after {self.nbytes / GIB:.2f} GiB: "
                f"{first_line(error)}; offload less, recompute instead, or take fewer slots"
            ) from error

    def release(self) -> None:
        """Give all memory back to the host."""
        self._pieces = {}
        if self._page_locked and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch._C._host_emptyCache()


def _places(sizes: Sequence[int], lengths: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Lay things out one after the other in pieces of memory, none across two, adding pieces where all are full.

    Returns:
        Piece and first byte of each thing, and the lengths of all pieces.
    """
    found, lengths = [], list(lengths)
    largest = max(PIECE, _power_of_two(max(sizes, default=0)))
    left = sum(round_up(size, ALIGNMENT) for size in sizes)
    piece, start = 0, 0
    for size in sizes:
        while piece < len(lengths) and start + size > lengths[piece]:
            piece, start = piece + 1, 0
        if piece == len(lengths):
            lengths.append(min(largest, _power_of_two(max(left, size))))
        found.append((piece, start))
        start += round_up(size, ALIGNMENT)
        left -= round_up(size, ALIGNMENT)
    return found, lengths


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
