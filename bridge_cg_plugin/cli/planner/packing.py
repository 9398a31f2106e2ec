"""Packing documents as Bridge does."""

import random
from collections.abc import Callable, Sequence

from bridge_cg_plugin.graphs.planning.buckets import round_up

from .errors import PlanError

Pack = tuple[int, ...]


class _FirstFit:
    """Finds the first of many bins that has room, in logarithmic time: a tree of the room left."""

    def __init__(self, bins: int, size: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._room = [size] * (2 * self._leaves)

    def place(self, need: int) -> int:
        """Take room in the first bin that has it; returns the bin."""
        node = 1
        while node < self._leaves:
            node = 2 * node if self._room[2 * node] >= need else 2 * node + 1
        self._room[node] -= need
        found = node - self._leaves
        while node > 1:
            node //= 2
            self._room[node] = max(self._room[2 * node], self._room[2 * node + 1])
        return found


def first_fit(lengths: Sequence[int], size: int) -> list[Pack]:
    """Put every document into the first pack that has room for it.

    Raises:
        PlanError: A document is longer than a pack.
    """
    if lengths and max(lengths) > size:
        raise PlanError(
            f"Cannot use --pack-size {size}: a document has {max(lengths)} tokens. Raise it, or cut with --truncate."
        )
    bins = _FirstFit(len(lengths), size)
    packs: list[list[int]] = []
    for length in lengths:
        place = bins.place(length)
        if place == len(packs):
            packs.append([])
        packs[place].append(length)
    return [tuple(pack) for pack in packs]


def first_fit_decreasing(lengths: Sequence[int], size: int) -> list[Pack]:
    """First fit of the longest documents first."""
    return first_fit(sorted(lengths, reverse=True), size)


def first_fit_shuffle(lengths: Sequence[int], size: int, seed: int = 0) -> list[Pack]:
    """First fit in random order."""
    return first_fit(random.Random(seed).sample(lengths, len(lengths)), size)


def in_batch(lengths: Sequence[int], count: int, seed: int = 0) -> list[Pack]:
    """Join every `count` documents of a random order, as in-batch packing joins a microbatch."""
    if count < 1:
        raise PlanError(f"Cannot use --micro-batch-size {count}: it must be a whole number of at least 1.")
    order = random.Random(seed).sample(lengths, len(lengths))
    return [tuple(order[i : i + count]) for i in range(0, len(order) - count + 1, count)]


# How documents get into packs; the last takes a number of documents where the others take a pack's size.
ALGORITHMS: dict[str, Callable[[Sequence[int], int], list[Pack]]] = {
    "first_fit_shuffle": first_fit_shuffle,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit": first_fit,
    "in_batch": in_batch,
}


def padded_documents(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return lengths rounded up to a multiple of `multiple` tokens, so that ranks can share every document."""
    return tuple(round_up(length, multiple) for length in lengths)


def padded_packs(packs: Sequence[Pack], multiple: int) -> list[Pack]:
    """Return packs of a multiple of `multiple` tokens; what is missing is a document of its own, as Bridge has it."""
    return [(*pack, rest) if (rest := -sum(pack) % multiple) else tuple(pack) for pack in packs]
