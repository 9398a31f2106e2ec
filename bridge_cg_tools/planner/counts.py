"""Values of a histogram, each as often as it counts."""

from collections.abc import Sequence

# A plan from so many values takes seconds; more of them in the same shares change nothing in it.
MOST = 200_000


def drawn[Value](counts: Sequence[tuple[Value, int]]) -> list[Value]:
    """Return every value as often as it counts.

    Above `MOST` in all, counts are scaled down in the same shares, and what is there at all stays there once.

    Args:
        counts: Values and how often each is there, at least 0.
    """
    total = sum(count for _, count in counts)
    if total > MOST:
        counts = [(value, max(count * MOST // total, 1)) for value, count in counts if count]
    return [value for value, count in counts for _ in range(count)]
