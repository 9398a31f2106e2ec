"""Places that runs of a benchmark wait for, in the order of their turns: on GPUs, among processes that import."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Places:
    """Several kinds of places, so many of each.

    Args:
        counts: Places of each kind, a GPU for one.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._left = list(counts)
        self._counts = tuple(counts)
        self._turn = 0
        self._changed = threading.Condition()

    @contextmanager
    def held(self, turn: int, kinds: Sequence[int], amount: int = 1) -> Iterator[None]:
        """Wait until there is room for a run whose turn it is, and hold its places inside.

        Args:
            turn: Number of the run, from 0: none begins before those of lower numbers have begun. Every run must come.
            kinds: Kinds of places that it takes.
            amount: Places of each; all that there are where there are not so many.
        """
        taken = {kind: min(amount, self._counts[kind]) for kind in kinds}

        def may_begin() -> bool:
            return turn == self._turn and all(self._left[kind] >= count for kind, count in taken.items())

        with self._changed:
            self._changed.wait_for(may_begin)
            self._add(taken, -1)
            self._turn += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._add(taken, 1)
                self._changed.notify_all()

    def _add(self, taken: dict[int, int], sign: int) -> None:
        for kind, count in taken.items():
            self._left[kind] += sign * count
