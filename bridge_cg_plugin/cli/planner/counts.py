"""Values of a histogram, each as often as it counts."""

from collections.abc import Sequence
from typing import Any

# A plan from so many values takes seconds; more of them in the same shares change nothing in it.
MOST = 200_000


def whole_count(value: Any) -> int | None:
    """Return a count of a JSON file as a whole number of at least 0, None for what is none; 3e5 is one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


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
