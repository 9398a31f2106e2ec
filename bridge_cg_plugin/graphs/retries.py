"""When what failed is tried again: the cause may be gone, but a try must not cost much of a run."""

from collections.abc import Hashable

from .fallback import Fallback


class Retry:
    """Waits before one more try for turns whose number doubles with each failure, so that N turns see log2(N) tries.

    Ranks that count the same turns and fail together try together.

    Args:
        turns: To wait after the first failure.
    """

    def __init__(self, turns: int) -> None:
        self._wait, self._left = turns, 0

    @property
    def due(self) -> bool:
        """Whether to try: nothing failed yet, or long enough ago."""
        return self._left <= 0

    def failed(self) -> None:
        """Note a failure."""
        self._left, self._wait = self._wait, 2 * self._wait

    def turn(self) -> None:
        """Count a turn."""
        self._left -= 1


class Failures:
    """What could not be recorded, and why.

    Args:
        turns: Microbatches that ask for it in vain before it is first tried again.
    """

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._reasons: dict[Hashable, Fallback] = {}
        self._retries: dict[Hashable, Retry] = {}

    def note(self, what: Hashable, reason: Fallback) -> None:
        """Note that something could not be recorded; the first of several reasons counts."""
        if what not in self._reasons:
            self._reasons[what] = reason
            self._retries.setdefault(what, Retry(self._turns)).failed()

    def reason(self, what: Hashable) -> Fallback | None:
        """Return why something is not recorded now, None where it may be."""
        return self._reasons.get(what)

    def ask(self, what: Hashable) -> None:
        """Note that a microbatch asks for something; what was in vain for long enough may be recorded again."""
        if what in self._reasons:
            self._retries[what].turn()
            if self._retries[what].due:
                del self._reasons[what]
