"""What one forward and backward of a region save and use, as observed before it is recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

Group = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """One storage that autograd saved tensors of.

    Attributes:
        nbytes: Its size.
        scope: The part of the model that saved it first.
        kind: How it can be recomputed to the bit, None where it cannot.
        sources: Storages, by place, that this reads.
    """

    nbytes: int
    scope: str
    kind: str | None = None
    sources: tuple[int, ...] = ()

    @property
    def group(self) -> Group | None:
        """What costs of rebuilding are measured for: kind and scope; None where it cannot be rebuilt."""
        return None if self.kind is None else (self.kind, self.scope)


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of the backward.

    Attributes:
        what: "use" when autograd asks for a saved tensor, "end" when nothing needs its storage any more.
        place: Of the storage in the order in which storages were saved.
    """

    what: Literal["use", "end"]
    place: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The storages in the order in which they were saved, and what a backward does with them.

    Attributes:
        seen: Storages.
        backward: Moments of the backward in their order.
        parts: Of a chain, each part's inventory in the order of their forwards, with places of its own.
    """

    seen: tuple[Seen, ...]
    backward: tuple[Event, ...]
    parts: "tuple[Inventory, ...]" = ()

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return sum(one.nbytes for one in self.seen)

    @property
    def each(self) -> "tuple[Inventory, ...]":
        """The inventories of what is recorded together: of all parts, or this one."""
        return self.parts or (self,)

    def check(self, place: int, nbytes: int) -> None:
        """Make sure that a recording saves what was observed.

        Raises:
            ValueError: It does not.
        """
        if place >= len(self.seen) or self.seen[place].nbytes != nbytes:
            there = f"{self.seen[place].nbytes} bytes" if place < len(self.seen) else "nothing"
            raise ValueError(
                f"the recorded forward saved other tensors than the pass before it: {nbytes} bytes in place {place}, "
                f"{there} before; keep activations on the device: set the options of offloading and recompute to None"
            )


def joined(parts: Sequence[Inventory]) -> Inventory:
    """Return the inventory of parts that run one after the other, their backwards from the last on."""
    starts = starts_of(parts)
    seen = [
        replace(one, sources=tuple(start + source for source in one.sources))
        for start, part in zip(starts, parts, strict=True)
        for one in part.seen
    ]
    backward = [
        Event(event.what, start + event.place)
        for start, part in reversed(list(zip(starts, parts, strict=True)))
        for event in part.backward
    ]
    return Inventory(tuple(seen), tuple(backward), tuple(parts))


def starts_of(parts: Sequence[Inventory]) -> list[int]:
    """Return the place of each part's first storage among those of all."""
    return [0, *accumulate(len(part.seen) for part in parts)][: len(parts)]
