"""Which activations leave the device: the cheapest first, until what stays fits a memory target.

In this order: norms and GELU are recomputed; as much is offloaded as copies hide behind the forward; products are
recomputed; the rest is offloaded, for the time of its copies. A part of a layer waits for its copies at its end, so
that they hide behind nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from operator import itemgetter
from types import MappingProxyType
from typing import Literal

# What costs less comes first. On an H200, a recomputed GB of GELU takes 0.7 to 0.9 ms, of norms 0.7 to 1.7, of products
# 1.7 to 6.4; a copied one takes 1.2 from the kernels beside it, and 18 where it is waited for.
RECOMPUTED = {"layernorm": 0, "gelu": 0, "linear": 2}
HIDDEN_COPY, COPY = 1, 3
# Option -> its name in messages, where nobody gave it another.
OWN_NAMES = MappingProxyType({name: name for name in ("offload", "recompute", "offload_above_gb")})


class Fate(Enum):
    """What becomes of a storage between the forward and the backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    REBUILD = "rebuild"


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


# A moment of the backward: "use" when autograd asks for a saved tensor, "end" when nothing needs its storage any more,
# and the storage's place in the order in which storages were saved.
Event = tuple[Literal["use", "end"], int]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The storages in the order in which they were saved, and the moments of the backward in theirs."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every storage of a part of a model; a whole region is one part.

    Attributes:
        inventory: What the part saves.
        fates: One for each storage.
        window: Bytes that may be on the device at once.
        reserve: Part of the window for what comes next: beyond the rest the forward waits for copies under way, and the
            backward fetches nothing ahead.
    """

    inventory: Inventory
    fates: tuple[Fate, ...]
    window: int
    reserve: int = 0

    @property
    def room(self) -> int:
        """Bytes up to which the forward waits for no copy and the backward fetches ahead."""
        return self.window - self.reserve

    def nbytes(self, fate: Fate) -> int:
        """Return the bytes of all storages of this fate."""
        return sum(self.inventory.seen[place].nbytes for place in self.places(fate))

    def places(self, fate: Fate) -> list[int]:
        """Return the storages of this fate."""
        return [place for place, found in enumerate(self.fates) if found is fate]


@dataclass(frozen=True, slots=True)
class Policy:
    """What is asked for.

    Attributes:
        scopes: Parts of the model whose storages may be offloaded.
        kinds: What may be recomputed.
        offload_above_gb: Device memory of a slot, in GiB, that a mix of both keeps to; None does all that is allowed.
        least_bytes: Smallest storage that is offloaded or recomputed.
        fields: Option -> the name that users know it by, for messages.
    """

    scopes: frozenset[str]
    kinds: frozenset[str]
    offload_above_gb: float | None = None
    least_bytes: int = 1 << 20
    fields: Mapping[str, str] = OWN_NAMES


def fixed_plans(parts: Sequence[Inventory], policy: Policy) -> list[Plan]:
    """Return the plans that rebuild and offload all that is allowed, with room for copies on their way.

    That is a quarter of what is saved, and at least twice what comes at one moment.

    Args:
        parts: What is saved and used by parts that run one after the other and share memory; a whole region is one.
        policy: What may be done.
    """
    fates = [[Fate.KEEP] * len(part.seen) for part in parts]
    for part, place, fate in _cheapest_first(parts, 0, policy):
        fates[part][place] = fate
    kept, needed = sum(map(kept_bytes, parts, fates)), max(map(needed_at_once, parts, fates))
    return _plans(parts, fates, kept + max(2 * needed, sum(part.nbytes for part in parts) // 4))


def plans_within(parts: Sequence[Inventory], hidden: int, policy: Policy, window: int) -> tuple[list[Plan] | None, int]:
    """Return the plans of parts whose activations fit a window at the least cost, and the fewest bytes of any plans.

    Args:
        parts: See `fixed_plans`.
        hidden: Bytes whose copies hide behind other work.
        policy: What may be done.
        window: Bytes of activations on the device at once; where none fit, there are no plans.
    """
    fewest = sum(part.nbytes for part in parts)
    for fates, least in _choices(parts, hidden, policy):
        fewest = min(fewest, least)
        if least <= window:
            return _plans(parts, fates, window), fewest
    return None, fewest


def _plans(parts: Sequence[Inventory], fates: Sequence[Sequence[Fate]], window: int) -> list[Plan]:
    """Return a plan for each part: its window is what is left by activations that parts before it keep."""
    plans = []
    for part, own in zip(parts, fates, strict=True):
        plans.append(Plan(part, tuple(own), window, needed_at_once(part, own)))
        window -= kept_bytes(part, own)
    return plans


def _choices(parts: Sequence[Inventory], hidden: int, policy: Policy) -> Iterator[tuple[Sequence[Sequence[Fate]], int]]:
    """Yield fates of every part's storages, of which one more leaves each time, with the window that they need."""
    fates = [[Fate.KEEP] * len(part.seen) for part in parts]
    kept, needed = [part.nbytes for part in parts], [0] * len(parts)
    yield fates, _least_window(kept, needed)
    for part, place, fate in _cheapest_first(parts, hidden, policy):
        fates[part][place] = fate
        kept[part] -= parts[part].seen[place].nbytes
        needed[part] = needed_at_once(parts[part], fates[part])
        yield fates, _least_window(kept, needed)


def _least_window(kept: Sequence[int], needed: Sequence[int]) -> int:
    """Return what parts take that keep so much each and need so much more at one moment."""
    before = least = 0
    for of_part, more in zip(kept, needed, strict=True):
        before += of_part
        least = max(least, before + more)
    return least


def _cheapest_first(parts: Sequence[Inventory], hidden: int, policy: Policy) -> list[tuple[int, int, Fate]]:
    """Return what may leave, as part, place and fate, in the order of what a byte costs.

    Of what costs the same, copies of what cannot be recomputed go first; then the first storage of every part, which is
    needed last, then the second: every part hides a little.
    """
    order = sorted(
        (seen.kind in policy.kinds, place, part)
        for part, each in enumerate(parts)
        for place, seen in enumerate(each.seen)
    )
    found = []
    for recomputable, place, part in order:
        seen = parts[part].seen[place]
        ways = []
        if recomputable:
            ways.append((RECOMPUTED.get(str(seen.kind), 0), Fate.REBUILD))
        if seen.scope in policy.scopes:
            ways.append((HIDDEN_COPY if seen.nbytes <= hidden else COPY, Fate.OFFLOAD))
        if ways:
            cost, fate = min(ways, key=itemgetter(0))
            hidden -= seen.nbytes if cost == HIDDEN_COPY else 0
            found.append((cost, (part, place, fate)))
    return [leaving for _, leaving in sorted(found, key=itemgetter(0))]


def kept_bytes(inventory: Inventory, fates: Sequence[Fate]) -> int:
    """Return the bytes that stay on the device between forward and backward."""
    return sum(seen.nbytes for seen, fate in zip(inventory.seen, fates, strict=True) if fate is Fate.KEEP)


def needed_at_once(inventory: Inventory, fates: Sequence[Fate]) -> int:
    """Return the most bytes, besides those that stay, that are there at one moment if each comes when it is needed."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for moment, (what, place) in enumerate(inventory.backward):
        if what == "use":
            first.setdefault(place, moment)
        last[place] = moment
    for place, seen in reversed(list(enumerate(inventory.seen))):  # sources were saved before
        if fates[place] is Fate.REBUILD and place in first:
            for source in seen.sources:
                first[source] = min(first.get(source, first[place]), first[place])
                last[source] = max(last.get(source, first[place]), first[place])
    changes = [0] * (len(inventory.backward) + 1)
    largest = 0
    for place, seen in enumerate(inventory.seen):
        if fates[place] is not Fate.KEEP:
            largest = max(largest, seen.nbytes)
            if place in first:
                changes[first[place]] += seen.nbytes
                changes[last[place] + 1] -= seen.nbytes
    return max(largest, *accumulate(changes))
