"""When storages leave the device and come back: the bookkeeping that a recording and its forecast share."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .inventory import Inventory


class Fate(Enum):
    """What becomes of a storage between the forward and the backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    REBUILD = "rebuild"


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every storage of an inventory.

    Attributes:
        fates: One for each storage.
        window: Bytes that may be on the device at once.
        reserve: Part of the window for what comes next: beyond the rest the forward waits for copies under way, and the
            backward fetches nothing ahead.
    """

    fates: tuple[Fate, ...]
    window: int
    reserve: int = 0

    @property
    def room(self) -> int:
        """Bytes up to which the forward waits for no copy and the backward fetches ahead."""
        return self.window - self.reserve

    def places(self, fate: Fate) -> list[int]:
        """Return the storages of this fate."""
        return [place for place, found in enumerate(self.fates) if found is fate]


class Mover(Protocol):
    """Does what a schedule decides."""

    def offload(self, place: int) -> None:
        """Begin to copy a storage to the host."""

    def settle(self, place: int) -> None:
        """Let the main work wait until it was copied, then give its memory back."""

    def load(self, place: int) -> None:
        """Take memory and begin to copy a storage back."""

    def arrive(self, place: int) -> None:
        """Let the main work wait until it is back."""

    def rebuild(self, place: int) -> None:
        """Make a storage again from its sources, which are there."""


class Schedule:
    """Follows one forward and its backward and tells the mover what to do.

    Args:
        inventory: What will be saved and used.
        plan: What becomes of it.
        mover: Does it.

    Attributes:
        resident: Bytes of storages on the device now.
        peak: Most that there were.
    """

    def __init__(self, inventory: Inventory, plan: Plan, mover: Mover) -> None:
        self._inventory, self._plan, self._mover = inventory, plan, mover
        self.resident = self.peak = 0
        self._leaving: deque[int] = deque()
        self._there: set[int] = set()
        self._arriving: set[int] = set()
        self._away: list[int] = []

    def saved(self, place: int) -> None:
        """Note that autograd saved a storage."""
        fate = self._plan.fates[place]
        if fate is Fate.REBUILD:
            return
        self._grow(place)
        if fate is Fate.OFFLOAD:
            self._mover.offload(place)
            self._leaving.append(place)
        while self.resident > self._plan.room and self._leaving:
            self._settle()

    def join(self) -> None:
        """Wait for what is still being copied: the forward is over."""
        while self._leaving:
            self._settle()

    def begin_backward(self) -> None:
        """Begin to fetch what the backward uses first."""
        self._away = self._order_of_return()
        self._fetch()

    def used(self, place: int) -> None:
        """Have a storage on the device, as autograd asks for it."""
        self._bring(place)
        self._fetch()

    def ended(self, place: int) -> None:
        """Note that nothing needs a storage any more."""
        if place in self._away:
            self._away.remove(place)
        if place in self._there:
            self._there.remove(place)
            self._arriving.discard(place)
            self.resident -= self._inventory.seen[place].nbytes
        self._fetch()

    def end_backward(self) -> None:
        """Wait for what was fetched and never asked for."""
        for place in sorted(self._arriving):
            self._mover.arrive(place)
        self._arriving.clear()

    def _order_of_return(self) -> list[int]:
        order: dict[int, None] = {}
        for event in self._inventory.backward:
            if event.what == "use":
                self._note_need(event.place, order)
        return [place for place in order if self._plan.fates[place] is Fate.OFFLOAD and place not in self._there]

    def _note_need(self, place: int, order: dict[int, None]) -> None:
        if place in order:
            return
        if self._plan.fates[place] is Fate.REBUILD:
            for source in self._inventory.seen[place].sources:
                self._note_need(source, order)
        order.setdefault(place)

    def _bring(self, place: int) -> None:
        if place not in self._there:
            if self._plan.fates[place] is Fate.REBUILD:
                for source in self._inventory.seen[place].sources:
                    self._bring(source)
                self._grow(place)
                self._mover.rebuild(place)
            else:
                self._load(place)
        if place in self._arriving:
            self._arriving.remove(place)
            self._mover.arrive(place)

    def _fetch(self) -> None:
        while self._away and self.resident + self._inventory.seen[self._away[0]].nbytes <= self._plan.room:
            self._load(self._away[0])

    def _load(self, place: int) -> None:
        self._away.remove(place)
        self._grow(place)
        self._arriving.add(place)
        self._mover.load(place)

    def _settle(self) -> None:
        place = self._leaving.popleft()
        self._mover.settle(place)
        self._there.remove(place)
        self.resident -= self._inventory.seen[place].nbytes

    def _grow(self, place: int) -> None:
        self._there.add(place)
        self.resident += self._inventory.seen[place].nbytes
        self.peak = max(self.peak, self.resident)
