"""Device memory that somebody else takes while a model's is away, and whether a replay wrote to it."""

from collections.abc import Iterable

import torch
from torch import Tensor

PATTERN = 0x5A5A_A5A5
WORD = torch.int64
LEAST_BYTES = 1 << 20  # smaller blocks come from memory that the allocator shares out


class Canary:
    """Blocks of a known pattern, as large as those that left: the allocator gives them the same addresses.

    Args:
        sizes: Bytes of what left; small ones are left out.
        device: Where they are.
    """

    def __init__(self, sizes: Iterable[int], device: str = "cuda") -> None:
        wanted = [size for size in sizes if size >= LEAST_BYTES]
        self._blocks: list[Tensor] = [
            torch.full((size // WORD.itemsize,), PATTERN, dtype=WORD, device=device) for size in wanted
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def holds(self, address: int) -> bool:
        """Whether an address of the device is in one of the blocks."""
        return any(block.data_ptr() <= address < block.data_ptr() + block.nbytes for block in self._blocks)

    def intact(self) -> bool:
        """Whether nobody wrote to any block."""
        return all(bool((block == PATTERN).all()) for block in self._blocks)

    def release(self) -> None:
        """Give the memory back to the device."""
        self._blocks.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
