"""Least squares without negative weights, which cost models are fitted by."""

from collections.abc import Mapping, Sequence

import numpy as np

# Eager is bound by the host where it takes this many times as long as the GPU works.
HOST_BOUND = 1.5


def non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the least-squares weights of at least 0: the column farthest below is left out until none is."""
    table, wanted = np.array(rows), np.array(values)
    kept = list(range(table.shape[1]))
    while True:
        weights, *_ = np.linalg.lstsq(table[:, kept], wanted, rcond=None)
        if not len(weights) or weights.min() >= 0:
            break
        kept.pop(int(weights.argmin()))
    found = dict(zip(kept, map(float, weights), strict=True))
    return [found.get(column, 0.0) for column in range(table.shape[1])]


def least_relative(names: Sequence[str], rows: Sequence[tuple[Mapping[str, float], float, float]]) -> dict[str, float]:
    """Return weights of at least 0 with the least relative errors; 0 without any row.

    Args:
        names: Of the weights.
        rows: Amounts by name, what was measured, and what of it others account for.
    """
    if not rows:
        return dict.fromkeys(names, 0.0)
    table = [[amount[name] / whole for name in names] for amount, whole, _ in rows]
    wanted = [(whole - known) / whole for _, whole, known in rows]
    return dict(zip(names, non_negative(table, wanted), strict=True))
