"""Offloading and recompute of a region's activations as a user's options say it, from a look at what they are."""

import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from ..announce import announce
from ..graphs.buckets import Bucket
from ..graphs.errors import CaptureError
from ..graphs.manager import GraphManager
from ..graphs.recordings.chain import NOTHING_LEAVES, Offloading
from ..graphs.recordings.executor import Executor
from ..graphs.recordings.recording import STAY, Activations, RegionBody
from ..options.vision import OFFLOAD_MODULES, RECOMPUTE, CapturedOptions
from .host import GIB, PinnedMemory
from .plan import Event, Fate, Inventory, Plan, Policy, Seen, fixed_plans, plans_within
from .registry import Record, raw_bytes
from .store import ActivationStore, CudaTransfers, Packing, SavedStorage, Transfers, rebuilding_of, rebuilt

# Cycles that a GPU waits meanwhile, about 50 ms: the host needs less to submit a forward.
SUBMISSION_CYCLES = 100_000_000
# Of a copy that is timed: as much as some activations.
PROBE_BYTES = 1 << 26


class Observer(Packing):
    """Lets every activation stay and takes notes; see `graphs.recordings.recording.Activations`.

    Args:
        device: Where the work runs.
        least: Smallest storage, in bytes, that may leave the device.

    Attributes:
        forward_ms: Time of the forward in ms, about what it is in a graph.
        refused: Kinds that were not recomputed to the bit, with how many storages.
        others: Most bytes on the device in the backward that are no saved storages: gradients, workspaces.
    """

    def __init__(self, device: torch.device, least: int) -> None:
        super().__init__(least)
        self.forward_ms, self.others, self.refused = 0.0, 0, Counter[str]()
        self._device = device
        self._seen: list[Seen] = []
        self._alive: dict[int, SavedStorage] = {}
        self._events: list[Event] = []
        self._staying: dict[int, int] = {}
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self._resident = 0  # bytes of saved storages that are there in the backward

    @property
    def inventory(self) -> Inventory:
        """What was seen in a forward and its backward."""
        return Inventory(tuple(self._seen), tuple(self._events))

    @property
    def stays(self) -> int:
        """Bytes of `others` that a forward leaves for its backward: small tensors, and marked ones."""
        return sum(self._staying.values())

    @contextmanager
    def saving(self, fixed: Iterable[Tensor]) -> Iterator[None]:
        """See `Activations`."""
        with timing(self._device) as spent, self.hooked(fixed):
            yield
        (self.forward_ms,) = spent
        self._check_recipes()
        self._resident = sum(saved.nbytes for saved in self._alive.values())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        # From here on storages end when autograd drops them.
        self._alive = {}

    def _stays(self, tensor: Tensor) -> None:
        if tensor.device.type == self._device.type and not self._registry.is_fixed(tensor):
            storage = tensor.untyped_storage()
            self._staying[storage.data_ptr()] = storage.nbytes()

    def _first_saved(self, saved: SavedStorage, record: Record, tensor: Tensor) -> None:
        self._alive[saved.place] = saved
        saved.rebuilding = rebuilding_of(record, tensor)
        self._seen.append(Seen(saved.nbytes, self._registry.scope))

    def _check_recipes(self) -> None:
        """Keep the recipes that give the storage back to the bit."""
        for place, saved in self._alive.items():
            if saved.rebuilding is None:
                continue
            (recipe, sources), saved.rebuilding = saved.rebuilding, None
            again = rebuilt(recipe, sources)
            if again.nbytes() != saved.nbytes or not torch.equal(raw_bytes(saved.on_device), raw_bytes(again)):
                self.refused[recipe.kind] += 1
                continue
            places = tuple(source.place for source in sources if source is not None)
            self._seen[place] = replace(self._seen[place], kind=recipe.kind, sources=places)

    def _used(self, saved: SavedStorage) -> None:
        self._events.append(("use", saved.place))
        self._look_at_memory()

    def _ended(self, place: int) -> None:
        self._events.append(("end", place))
        self._look_at_memory()
        self._resident -= self._seen[place].nbytes

    def _look_at_memory(self) -> None:
        """Take the most memory since the last look into account."""
        if self._device.type == "cuda":
            taken = torch.cuda.max_memory_allocated(self._device) - self._before
            self.others = max(self.others, taken - self._resident)
            torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def timing(device: torch.device) -> Iterator[list[float]]:
    """Yield a list to which the ms are added that the work inside took.

    A GPU is kept busy while its launches are submitted: as in a graph, they take no time.
    """
    spent: list[float] = []
    if device.type != "cuda":
        began = time.perf_counter()
        yield spent
        spent.append((time.perf_counter() - began) * 1e3)
        return
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(SUBMISSION_CYCLES)
    marks[0].record()
    yield spent
    marks[1].record()
    marks[1].synchronize()
    spent.append(marks[0].elapsed_time(marks[1]))


@functools.cache
def offload_rate(device: torch.device) -> float:
    """Return the rate of copies to page-locked memory in bytes a ms, measured once a process."""
    memory = PinnedMemory(page_locked=device.type == "cuda")
    host, source = memory.reserve(0, {0: PROBE_BYTES})[0], torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    host.copy_(source, non_blocking=True)
    with timing(device) as spent:
        host.copy_(source, non_blocking=True)
    del host
    memory.release()
    return PROBE_BYTES / spent[0]


# Smallest activation that is offloaded or recomputed.
LEAST_BYTES = 1 << 20

# Slots that are recorded again for less memory before a target is given up.
ATTEMPTS = 4
# Part of a forward that copies hide behind: they are slower beside kernels, and the last ones come too late.
HIDES = 0.7
# A slot may take this much more than its target.
TOLERANCE = 1.01


# A bucket, and each part with the number of what the model is: a frozen layer saves less.
type _Key = tuple[Bucket, tuple[tuple[str, int], ...]]


class RegionOffloading(Offloading):
    """See `Offloading`.

    Args:
        policy: What is asked for.
        slots: Slots of the region, all of which need host memory.
        device: Where the region runs.
    """

    def __init__(self, policy: Policy, slots: int, device: torch.device) -> None:
        self._policy, self._slots, self._device = policy, slots, device
        self._pinned = PinnedMemory(device.type == "cuda", policy.fields)
        self._transfers = CudaTransfers(device) if device.type == "cuda" else Transfers()
        self._plans: dict[_Key, Sequence[Plan] | None] = {}
        self._looked: dict[_Key, list[Observer]] = {}
        # Bytes that pools were seen to take beyond what was planned, and how often that was.
        self._beyond = self._excesses = 0

    @property
    def pinned_bytes(self) -> int:
        """See `Offloading`."""
        return self._pinned.nbytes

    def prepare(self, executor: Executor, bodies: Sequence[RegionBody], slot: int) -> Sequence[Activations]:
        """See `Offloading`. A bucket's first slot decides for all."""
        key = bodies[0].bucket, tuple((body.name, body.state) for body in bodies)
        if key not in self._plans:
            self._plans[key] = self._decide(executor, bodies, key)
        plans = self._plans[key]
        if plans is None:
            return [STAY] * len(bodies)
        hosts = self._pinned.reserve(slot, _offloaded(plans))
        return [
            ActivationStore(
                plan,
                {place: hosts[part, place] for place in plan.places(Fate.OFFLOAD)},
                self._transfers,
                self._policy.least_bytes,
            )
            for part, plan in enumerate(plans)
        ]

    def accepts(self, nbytes: int) -> bool:
        """See `Offloading`. What a pool takes beyond its blocks is known only once it is filled."""
        if self._policy.offload_above_gb is None or not self._plans:
            return True
        target = self._policy.offload_above_gb * GIB
        if nbytes <= target * TOLERANCE:
            return True
        self._excesses += 1
        if self._excesses > ATTEMPTS:
            raise CaptureError(self._refusal(max(bucket for bucket, _ in self._plans), nbytes))
        self._beyond += int(nbytes - target)
        self._plans.clear()
        return False

    def release(self) -> None:
        """See `Offloading`."""
        self._plans, self._looked = {}, {}
        self._beyond = self._excesses = 0
        if self._pinned.nbytes:
            self._pinned.release()

    def _decide(self, executor: Executor, bodies: Sequence[RegionBody], key: _Key) -> Sequence[Plan] | None:
        """Return what becomes of the activations of bodies that run one after the other, None where all stay."""
        if key not in self._looked:
            self._looked[key] = self._look(executor, bodies)
        observed = self._looked[key]
        inventories, bucket = [each.inventory for each in observed], bodies[0].bucket
        if self._policy.offload_above_gb is None:
            plans: Sequence[Plan] | None = fixed_plans(inventories, self._policy)
        else:
            plans = self._within_target(observed, bucket, static_bytes_of(bodies), self._policy.offload_above_gb)
        if plans is None:
            return None
        if all(fate is Fate.KEEP for plan in plans for fate in plan.fates):
            self._say_nothing_leaves(bucket, inventories)
            return None
        # Before any capture, host memory for all slots must be there; what is held counts.
        self._pinned.check(max(self._slots * sum(_offloaded(plans).values()) - self._pinned.nbytes, 0))
        return plans

    def _look(self, executor: Executor, bodies: Sequence[RegionBody]) -> list[Observer]:
        """Return what bodies save and use, from one look at each."""
        found = [Observer(self._device, self._policy.least_bytes) for _ in bodies]
        for body, observer in zip(bodies, found, strict=True):
            executor.observe(body, observer)
        for kind, count in sum((each.refused for each in found), Counter()).items():
            announce(f"{count} tensors of kind {kind} are not recomputed: that does not give them back to the bit")
        return found

    def _within_target(
        self, observed: Sequence[Observer], bucket: Bucket, static_bytes: int, target_gb: float
    ) -> Sequence[Plan] | None:
        """Return the cheapest plans that keep to the target, None where nothing need be done."""
        inventories, policy = [each.inventory for each in observed], self._policy
        # Of what is no saved storage, the most in the backwards of parts that run one after the other.
        most = before = 0
        for each in observed:
            most, before = max(most, before + each.others), before + each.stays
        others = most + static_bytes + self._beyond
        window = int(target_gb * GIB) - others
        if sum(inventory.nbytes for inventory in inventories) <= window:
            return None
        hidden = 0
        if len(inventories) == 1:
            hidden = int(HIDES * observed[0].forward_ms * offload_rate(self._device))
        plans, fewest = plans_within(inventories, hidden, policy, window)
        if plans is None:
            raise CaptureError(self._refusal(bucket, fewest + others))
        announce(f"bucket {bucket}: {describe(plans)}")
        return plans

    def _refusal(self, bucket: Bucket, least: int) -> str:
        names, works_gb = self._policy.fields, ceil(100 * least / GIB) / 100
        return (
            f"{names['offload_above_gb']}={self._policy.offload_above_gb:g}: bucket {bucket} needs at least "
            f"{works_gb:.2f} GiB a slot; raise it, take a smaller largest bucket, or allow more in "
            f"{names['offload']} and {names['recompute']}"
        )

    def _say_nothing_leaves(self, bucket: Bucket, inventories: Sequence[Inventory]) -> None:
        """Say so once where what was asked for moves nothing of the largest bucket."""
        if self._plans:
            return
        there = ", ".join(sorted({seen.scope for inventory in inventories for seen in inventory.seen})) or "none"
        names = self._policy.fields
        announce(
            f"{names['offload']} and {names['recompute']} move nothing of bucket {bucket}: parts that save tensors of "
            f"{self._policy.least_bytes} bytes or more: {there}"
        )


def offloading_of(options: CapturedOptions, fields: Mapping[str, str], manager: GraphManager) -> Offloading:
    """Return what keeps a region's activations.

    A memory target may use everything that the options do not rule out.

    Args:
        options: The region's.
        fields: Option -> the name that users know it by.
        manager: Whose executor records the region, in as many slots as it has.
    """
    if not options.moves_activations:
        return NOTHING_LEAVES
    unsaid = (OFFLOAD_MODULES, RECOMPUTE) if options.offload_above_gb is not None else ((), ())
    scopes, kinds = (
        frozenset(default if given is None else given)
        for given, default in zip((options.offload, options.recompute), unsaid, strict=True)
    )
    policy = Policy(scopes, kinds, options.offload_above_gb, LEAST_BYTES, fields)
    return RegionOffloading(policy, manager.slots, manager.executor.device)


def static_bytes_of(bodies: Sequence[RegionBody]) -> int:
    """Return the device memory of what bodies read and of gradients that they return, what is shared once."""
    return sum({t.data_ptr(): t.nbytes for body in bodies for t in body.static_tensors}.values())


def _offloaded(plans: Sequence[Plan]) -> dict[tuple[int, int], int]:
    """Return the bytes of every storage that goes to the host, by part and place."""
    return {
        (part, place): plan.inventory.seen[place].nbytes
        for part, plan in enumerate(plans)
        for place in plan.places(Fate.OFFLOAD)
    }


def describe(plans: Sequence[Plan]) -> str:
    """Return in words how many bytes are kept, offloaded and recomputed."""
    words = {Fate.KEEP: "kept", Fate.OFFLOAD: "offloaded", Fate.REBUILD: "recomputed"}
    return ", ".join(f"{sum(plan.nbytes(fate) for plan in plans) / GIB:.2f} GiB {word}" for fate, word in words.items())
