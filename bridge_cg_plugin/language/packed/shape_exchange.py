"""Ranks of expert parallelism: other packs, but every microbatch in the same bucket, or eager, on all of them.

A rank that replays gathers a bucket's tokens from every rank, and one that runs eager sends them by expert: side by
side they would wait for each other for ever. So each microbatch's shapes go to all ranks, over the hosts, before its
layers run. All then choose alike from the same shapes, as ranks do that share a pack.
"""

from collections.abc import Sequence

import torch
from torch import distributed

from .batch import OFFSETS, PADDED_OFFSETS, JointShape, PackShape

EVERY_OFFSET = (*OFFSETS, *PADDED_OFFSETS)
# Of a shape, behind whether there is one.
NUMBERS = 7


class ShapeExchange:
    """Gathers the shapes of all ranks of a process group; every rank calls it equally often.

    Args:
        group: A group of a CPU backend.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def joint(self, shape: PackShape | None, state: float) -> JointShape | None:
        """Return the shapes of all ranks, in an order that is the same on all, or None where one of them runs eager.

        Waits until every rank has come to the same microbatch.

        Args:
            shape: Of this rank's pack; None where it must run eager.
            state: Stands for what else decides how a microbatch runs. Ranks in different states run eager.
        """
        own = torch.tensor([int(state), shape is not None, *_numbers(shape)], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        distributed.all_gather(found, own, group=self._group)
        rows = [numbers.tolist() for numbers in found]
        if any(row[0] != rows[0][0] or not row[1] for row in rows):
            return None
        return JointShape(tuple(_shape(row[2:]) for row in rows))


def _numbers(shape: PackShape | None) -> Sequence[int]:
    """Return what `_shape` makes a shape of that the same buckets take."""
    if shape is None:
        return (0,) * NUMBERS
    layout = sum(1 << EVERY_OFFSET.index(name) for name in shape.layout)
    lengths = len(shape.lengths), max(shape.lengths), sum(shape.lengths)
    return shape.tokens, *lengths, layout, shape.rotated, len(shape.additions)


def _shape(numbers: Sequence[int]) -> PackShape:
    tokens, documents, longest, total, layout, rotated, additions = numbers
    names = tuple(name for place, name in enumerate(EVERY_OFFSET) if layout >> place & 1)
    return PackShape(tokens, (longest, *_spread(total - longest, documents - 1)), names, rotated, (None,) * additions)


def _spread(total: int, count: int) -> Sequence[int]:
    """Return as many numbers with this sum, as equal as they can be: none is above the largest that they stand for."""
    return [total // count + (place < total % count) for place in range(count)]
