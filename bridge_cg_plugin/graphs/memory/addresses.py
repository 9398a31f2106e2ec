"""Device addresses, reserved many at a time, so that neighbours can get one piece of memory."""

from dataclasses import dataclass

from .virtual_memory import VirtualMemory

ARENA_BYTES = 256 << 20


@dataclass(slots=True)
class _Arena:
    """Addresses that were reserved together.

    Attributes:
        address: The first one.
        nbytes: How many there are.
        taken: How many of them were given out, from the first on; none is given out twice.
        ranges: How many ranges of them are in use.
    """

    address: int
    nbytes: int
    taken: int = 0
    ranges: int = 0


class Addresses:
    """Ranges of addresses, one beside the other as far as an arena reaches.

    Args:
        driver: What reserves addresses. Sizes are multiples of its granularity.
        arena_bytes: How many are reserved at a time; a larger range has an arena of its own.
    """

    def __init__(self, driver: VirtualMemory, arena_bytes: int = ARENA_BYTES) -> None:
        self._driver, self._arena_bytes = driver, arena_bytes
        self._arenas: dict[int, _Arena] = {}
        self._current: _Arena | None = None

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return the first of `nbytes` addresses that nothing else gets, and the arena's first one."""
        arena = self._current
        if nbytes > self._arena_bytes:
            arena = self._new_arena(nbytes)
        elif arena is None or arena.taken + nbytes > arena.nbytes:
            arena = self._current = self._new_arena(self._arena_bytes)
        address = arena.address + arena.taken
        arena.taken += nbytes
        arena.ranges += 1
        return address, arena.address

    def _new_arena(self, nbytes: int) -> _Arena:
        address = self._driver.reserve(nbytes)
        self._arenas[address] = arena = _Arena(address, nbytes)
        return arena

    def give_back(self, address: int) -> None:
        """Give a range of an arena back, by the arena's first address; no memory is behind the range.

        The addresses are free once the whole arena is.
        """
        arena = self._arenas[address]
        arena.ranges -= 1
        if arena.ranges:
            return
        del self._arenas[address]
        if arena is self._current:
            self._current = None
        self._driver.free(arena.address, arena.nbytes)
