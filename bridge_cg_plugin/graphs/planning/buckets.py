"""Buckets and the one that a batch goes into. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..fallback import Fallback

# Attention and GEMM kernels work on tiles of this many tokens; finer capacities save nothing.
GRANULARITY = 64
# Up to here matrix libraries choose kernels by the number of rows, so padding would change eager's rounding.
EXACT_BELOW = 256


class Bucket(NamedTuple):
    """What one recording of a region is made for. Every replay looks it up several times: a tuple, hashed in C.

    Attributes:
        tokens: Capacity.
        limits: Further upper bounds that the program gave the recording; the engine does not interpret them.
    """

    tokens: int
    limits: tuple[int, ...] = ()

    def contains(self, other: "Bucket") -> bool:
        """Whether both have the same capacity and every limit here is at least the other's."""
        return self.tokens == other.tokens and all(a >= b for a, b in zip(self.limits, other.limits, strict=True))

    def __str__(self) -> str:
        return "/".join(map(str, (self.tokens, *self.limits)))


def raised(limit: int, needed: int) -> int:
    """Return a limit, doubled until it is at least what is needed."""
    while limit < needed:
        limit *= 2
    return limit


def names_of(capacities: Sequence[int]) -> str:
    """Return the buckets of some capacities in words."""
    return f"buckets {', '.join(map(str, capacities))} tokens" if capacities else "no bucket yet"


def next_run(capacities: Sequence[int], field: str) -> str:
    """Return how another run captures buckets of these capacities after its warm-up steps, and no others."""
    return f"{field}=[{','.join(map(str, capacities))}] captures these sizes after the warm-up steps"


def choose(tokens: int, buckets: Iterable[Bucket], refuse: Callable[[Bucket], Fallback | None]) -> Bucket | Fallback:
    """Return the first bucket that accepts a batch, or the reason why none does.

    Args:
        tokens: The batch's size.
        buckets: In the order in which they are tried.
        refuse: Returns why the batch may not use a bucket that has room for its tokens, or None if it may.
    """
    reason = Fallback.TOO_MANY_TOKENS
    for bucket in buckets:
        if tokens <= bucket.tokens:
            refusal = refuse(bucket)
            if refusal is None:
                return bucket
            reason = refusal
    return reason


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of a step that is no less than a value."""
    return -(-value // step) * step
