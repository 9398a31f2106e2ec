"""Chooses what is offloaded and what is rebuilt, by a forecast of every choice's time and memory."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .inventory import Event, Group, Inventory, starts_of
from .schedule import Fate, Plan, Schedule

# Steps in which the parts of a region that are offloaded and recomputed are varied.
STEPS = 54
REBUILT_STEPS = 9
# What copies take from kernels that run beside them, over the copies' time: measured on an H200.
CONTENTION = 0.03
# Rate of copies that run beside kernels over that of copies alone: measured on an H200, 49 of 55 GB/s.
BESIDE_KERNELS = 0.89


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured.

    Attributes:
        forward_ms, backward_ms: Of the region with all activations kept.
        offload_gbps, load_gbps: Copies to and from the host, in 10^9 bytes a second.
        rebuild_ms: Time to make a storage of a group again, over its bytes.
    """

    forward_ms: float
    backward_ms: float
    offload_gbps: float
    load_gbps: float
    rebuild_ms: dict[Group, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan is expected to do.

    Attributes:
        ms: Forward plus backward.
        peak: Most bytes of activations on the device.
        host_bytes: Bytes on the host.
    """

    ms: float
    peak: int
    host_bytes: int


def forecast(inventory: Inventory, plan: Plan, costs: Costs) -> Forecast:
    """Run a plan's schedule against measured costs instead of a device, part by part: copies end with their part."""
    total = max(inventory.nbytes, 1)
    ms, peak, kept = 0.0, 0, 0
    for part, of_part in zip(inventory.each, part_plans(inventory, plan), strict=True):
        found = _forecast(part, of_part, costs, part.nbytes / total)
        ms, peak = ms + found.ms, max(peak, kept + found.peak)
        kept += kept_bytes(part, of_part.fates)
    host = sum(inventory.seen[place].nbytes for place in plan.places(Fate.OFFLOAD))
    return Forecast(ms, peak, host)


def part_plans(inventory: Inventory, plan: Plan) -> list[Plan]:
    """Return the plan of each part: its window is what is left by activations that parts before it keep."""
    found, kept = [], 0
    for start, part in zip(starts_of(inventory.each), inventory.each, strict=True):
        fates = plan.fates[start : start + len(part.seen)]
        found.append(Plan(fates, plan.window - kept, plan.reserve))
        kept += kept_bytes(part, fates)
    return found


def kept_bytes(inventory: Inventory, fates: Sequence[Fate]) -> int:
    """Return the bytes that stay on the device between forward and backward."""
    return sum(seen.nbytes for seen, fate in zip(inventory.seen, fates, strict=True) if fate is Fate.KEEP)


def _forecast(inventory: Inventory, plan: Plan, costs: Costs, share: float) -> Forecast:
    """Return the forecast of one part, which takes a share of the time."""
    costs = replace(costs, forward_ms=costs.forward_ms * share, backward_ms=costs.backward_ms * share)
    clock = _Clock(inventory, costs)
    schedule = Schedule(inventory, plan, clock)
    total = max(inventory.nbytes, 1)
    for place, seen in enumerate(inventory.seen):
        clock.now += costs.forward_ms * seen.nbytes / total
        schedule.saved(place)
    schedule.join()
    clock.free = clock.now
    schedule.begin_backward()
    worked: set[int] = set()
    for event in moments(inventory, plan.fates):
        if event.what == "end":
            schedule.ended(event.place)
            continue
        schedule.used(event.place)
        if event.place not in worked:
            worked.add(event.place)
            clock.now += costs.backward_ms * inventory.seen[event.place].nbytes / total
    host = sum(inventory.seen[place].nbytes for place in plan.places(Fate.OFFLOAD))
    return Forecast(clock.now, schedule.peak, host)


class _Clock:
    """Tells the time that a mover's work takes: copies one after the other, beside the main work.

    Attributes:
        now: Time of the main work in ms.
        free: When the copies begun so far are done.
    """

    def __init__(self, inventory: Inventory, costs: Costs) -> None:
        self._inventory, self._costs = inventory, costs
        self.now = self.free = 0.0
        self._done: dict[int, float] = {}

    def offload(self, place: int) -> None:
        self._copy(place, self._costs.offload_gbps)

    def settle(self, place: int) -> None:
        self.now = max(self.now, self._done[place])

    def load(self, place: int) -> None:
        self._copy(place, self._costs.load_gbps)

    def arrive(self, place: int) -> None:
        self.now = max(self.now, self._done[place])

    def rebuild(self, place: int) -> None:
        seen = self._inventory.seen[place]
        per_byte = 0.0 if seen.group is None else self._costs.rebuild_ms.get(seen.group, 0.0)
        self.now += per_byte * seen.nbytes

    def _copy(self, place: int, gbps: float) -> None:
        taken = self._inventory.seen[place].nbytes / (BESIDE_KERNELS * gbps) / 1e6
        self.now += CONTENTION * taken
        self.free = max(self.free, self.now) + taken
        self._done[place] = self.free


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a plan may do.

    Attributes:
        scopes: Parts of the model whose storages may be offloaded.
        kinds: What may be recomputed.
    """

    scopes: frozenset[str]
    kinds: frozenset[str]


def fixed_plan(inventory: Inventory, allowed: Allowed) -> Plan:
    """Return the plan that rebuilds and offloads all that is allowed, with room for copies on their way.

    That is a quarter of what is saved, and at least twice what comes at one moment.
    """
    fates = tuple(
        Fate.REBUILD if s.kind in allowed.kinds else Fate.OFFLOAD if s.scope in allowed.scopes else Fate.KEEP
        for s in inventory.seen
    )
    needed = needed_at_once(inventory, fates)
    kept = kept_bytes(inventory, fates)
    return Plan(fates, kept + max(2 * needed, inventory.nbytes // 4), needed)


def needed_at_once(inventory: Inventory, fates: tuple[Fate, ...]) -> int:
    """Return the most bytes that come to the device at one moment, each fetched only when it is asked for."""
    plans = part_plans(inventory, Plan(fates, 0))
    return max(_needed_at_once(part, plan.fates) for part, plan in zip(inventory.each, plans, strict=True))


def _needed_at_once(inventory: Inventory, fates: tuple[Fate, ...]) -> int:
    without_kept = Inventory(
        tuple(replace(s, nbytes=0) if f is Fate.KEEP else s for s, f in zip(inventory.seen, fates, strict=True)),
        inventory.backward,
    )
    schedule = Schedule(without_kept, Plan(fates, 0), _Nothing())
    for place in range(len(inventory.seen)):
        schedule.saved(place)
    schedule.join()
    schedule.begin_backward()
    for event in moments(inventory, fates):
        (schedule.used if event.what == "use" else schedule.ended)(event.place)
    return max(schedule.peak, *(seen.nbytes for seen in inventory.seen), 0)


def moments(inventory: Inventory, fates: Sequence[Fate]) -> Iterator[Event]:
    """Yield the moments of the backward under these fates: what something is still to be made from ends after that."""
    waiting: dict[int, set[int]] = {}
    for place, fate in enumerate(fates):
        for source in inventory.seen[place].sources if fate is Fate.REBUILD else ():
            waiting.setdefault(source, set()).add(place)
    ended: set[int] = set()
    for event in inventory.backward:
        if event.what == "use":
            yield event
        else:
            ended.add(event.place)
        made = [event.place]
        while made:
            place = made.pop()
            if place in ended and not waiting.get(place):
                ended.remove(place)
                yield Event("end", place)
            if fates[place] is Fate.REBUILD:
                for source in inventory.seen[place].sources:
                    if place in waiting[source]:
                        waiting[source].remove(place)
                        made.append(source)


class _Nothing:
    """A mover for bookkeeping alone."""

    def offload(self, place: int) -> None:
        pass

    def settle(self, place: int) -> None:
        pass

    def load(self, place: int) -> None:
        pass

    def arrive(self, place: int) -> None:
        pass

    def rebuild(self, place: int) -> None:
        pass


def plan_within(inventory: Inventory, costs: Costs, allowed: Allowed, window: int) -> Plan | None:
    """Return the fastest plan whose activations fit a window, None where none does.

    Storages leave from the first on, as they are needed last; of a chain, the first of every part, then the second, as
    every part hides a little. What is rebuilt is added in the order of what a byte costs.

    Args:
        inventory: What is saved and used.
        costs: What was measured.
        allowed: What the plan may do.
        window: Bytes of activations on the device at once.
    """
    best: tuple[Forecast, Plan] | None = None
    for choice in _choices(inventory, costs, allowed):
        for fates in choice.feasible(window):
            plan = Plan(fates, window, needed_at_once(inventory, fates))
            found = forecast(inventory, plan, costs)
            if found.peak <= window:
                if best is None or _order(found) < _order(best[0]):
                    best = found, plan
                break  # what offloads more takes longer
    return None if best is None else best[1]


def smallest_peak(inventory: Inventory, costs: Costs, allowed: Allowed) -> int:
    """Return the fewest bytes of activations that any choice brings the device down to."""
    last = [fates for choice in _choices(inventory, costs, allowed) for fates in choice.extremes()]
    return min(forecast(inventory, Plan(fates, 0), costs).peak for fates in last)


def _order(found: Forecast) -> tuple[float, int]:
    return round(found.ms, 3), found.host_bytes


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is recomputed, and what of the rest may be offloaded, from the first storage on.

    Attributes:
        inventory: All storages.
        rebuilt: Places of those that are recomputed.
        left: Places of the rest that may be offloaded, in their order.
    """

    inventory: Inventory
    rebuilt: frozenset[int]
    left: tuple[int, ...]

    def feasible(self, window: int) -> Iterator[tuple[Fate, ...]]:
        """Yield fates of which no more is kept than a window holds, those that offload least first."""
        seen = self.inventory.seen
        kept = sum(s.nbytes for place, s in enumerate(seen) if place not in self.rebuilt)
        before = 0
        for count in _steps(len(self.left), STEPS):
            kept -= sum(seen[place].nbytes for place in self.left[before:count])
            before = count
            if kept <= window:
                yield self._fates(count)

    def extremes(self) -> Iterator[tuple[Fate, ...]]:
        """Yield the fates that offload nothing and everything."""
        yield self._fates(0)
        yield self._fates(len(self.left))

    def _fates(self, count: int) -> tuple[Fate, ...]:
        offloaded = set(self.left[:count])
        return tuple(
            Fate.REBUILD if place in self.rebuilt else Fate.OFFLOAD if place in offloaded else Fate.KEEP
            for place in range(len(self.inventory.seen))
        )


def _choices(inventory: Inventory, costs: Costs, allowed: Allowed) -> Iterator[_Choice]:
    """Yield what may be recomputed: cheap groups all through, the next one as far as a number of steps from the first.

    What is left can be offloaded where its scope is allowed.
    """
    known: set[frozenset[int]] = set()
    order = _order_of_leaving(inventory)
    for groups, last in _cheapest_first(inventory, costs, allowed.kinds):
        whole = {place for place, s in enumerate(inventory.seen) if s.group in groups}
        partly = [place for place, s in enumerate(inventory.seen) if last is not None and s.group == last]
        for count in _steps(len(partly), REBUILT_STEPS):
            rebuilt = frozenset(whole.union(partly[:count]))
            if rebuilt in known:
                continue
            known.add(rebuilt)
            seen = ((place, inventory.seen[place]) for place in order)
            left = tuple(p for p, s in seen if p not in rebuilt and s.scope in allowed.scopes)
            yield _Choice(inventory, rebuilt, left)


def _order_of_leaving(inventory: Inventory) -> list[int]:
    """Return all places, those that are saved earliest in their part first."""
    parts = zip(starts_of(inventory.each), inventory.each, strict=True)
    among = [(place, start) for start, part in parts for place in range(len(part.seen))]
    return [start + place for place, start in sorted(among)]


def _cheapest_first(
    inventory: Inventory, costs: Costs, kinds: Collection[str]
) -> Iterator[tuple[set[Group], Group | None]]:
    """Yield groups that are cheaper than a next one, and that."""
    groups = {s.group for s in inventory.seen if s.group is not None and s.kind in kinds}
    ordered = sorted(groups, key=lambda group: (costs.rebuild_ms.get(group, 0.0), group))
    for place, last in enumerate(ordered):
        yield set(ordered[:place]), last
    yield set(ordered), None


def _steps(count: int, most: int) -> list[int]:
    """Return counts from 0 to `count`, in `most` steps at most."""
    steps = min(most, count)
    return [count * step // max(steps, 1) for step in range(steps + 1)]
