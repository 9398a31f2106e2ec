"""What one forward and backward of a region save and use, as observed before it is recorded."""

from dataclasses import dataclass
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
    """

    seen: tuple[Seen, ...]
    backward: tuple[Event, ...]

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return sum(one.nbytes for one in self.seen)

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
