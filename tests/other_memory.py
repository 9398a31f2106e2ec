"""Memory that is surely other than before: whoever gives memory likes to give again what was freed last."""

from collections.abc import Collection

import torch
from torch import Tensor, UntypedStorage

CONTENT = 7


def fill_elsewhere(storage: UntypedStorage, nbytes: int, had: Collection[int]) -> list[Tensor]:
    """Give a storage that was freed memory at an address that it never had.

    Args:
        storage: A storage without memory.
        nbytes: Its size.
        had: Addresses that it had; without any, it may get any.

    Returns:
        What somebody else has made of memory meanwhile, one tensor at least; `are_intact` looks at it.
    """
    others: list[Tensor] = []
    while not others or storage.data_ptr() in had:
        storage.resize_(0)
        others.append(torch.full((nbytes,), CONTENT, dtype=torch.uint8, device=storage.device))
        storage.resize_(nbytes)
    return others


def are_intact(others: Collection[Tensor]) -> bool:
    """Whether nobody has written to what `fill_elsewhere` returned."""
    return all(bool((other == CONTENT).all()) for other in others)
