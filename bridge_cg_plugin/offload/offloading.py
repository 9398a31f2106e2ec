"""Offloading and recompute of a region's activations as a user's options say it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch

from ..announce import announce
from ..graphs.errors import CaptureError
from ..graphs.planning.buckets import Bucket
from ..graphs.recordings.activations import Activations
from ..graphs.recordings.executor import Executor
from ..graphs.recordings.recording import RegionBody
from ..graphs.workload import Manager
from ..options import OFFLOAD_MODULES, RECOMPUTE, CapturedOptions
from .host import GIB, PinnedMemory
from .observe import Observer, offload_rate, other_bytes
from .plan import Fate, Inventory, Plan, Policy, fixed_plans, plans_within, smallest_window
from .store import ActivationStore, CudaTransfers, Transfers

# Smallest activation that is offloaded or recomputed.
LEAST_BYTES = 1 << 20

# Slots that are recorded again for less memory before a target is given up.
ATTEMPTS = 4
# Part of a forward that copies hide behind: they are slower beside kernels, and the last ones come too late.
HIDES = 0.7
# A slot may take this much more than its target.
TOLERANCE = 1.01


class Planned(NamedTuple):
    """What a part of a model saves, and what becomes of it; a whole region is one part."""

    inventory: Inventory
    plan: Plan


# A bucket, and each part with the number of what the model is: a frozen layer saves less.
type _Key = tuple[Bucket, tuple[tuple[str, int], ...]]


class RegionOffloading:
    """See `graphs.recordings.chain.Offloading`.

    Args:
        policy: What is asked for.
        slots: Slots of the region, all of which need host memory.
        device: Where the region runs.
    """

    def __init__(self, policy: Policy, slots: int, device: torch.device) -> None:
        self._policy, self._slots, self._device = policy, slots, device
        self._pinned = PinnedMemory(device.type == "cuda", policy.fields)
        self._transfers = CudaTransfers(device) if device.type == "cuda" else Transfers()
        self._plans: dict[_Key, list[Planned] | None] = {}
        self._looked: dict[_Key, list[Observer]] = {}
        # Bytes that pools were seen to take beyond what was planned, and how often that was.
        self._beyond = self._excesses = 0

    @property
    def pinned_bytes(self) -> int:
        """See `Offloading`."""
        return self._pinned.nbytes

    def prepare(self, executor: Executor, bodies: Sequence[RegionBody], slot: int) -> Sequence[Activations | None]:
        """See `Offloading`. A bucket's first slot decides for all."""
        key = bodies[0].bucket, tuple((body.name, body.state) for body in bodies)
        if key not in self._plans:
            self._plans[key] = self._decide(executor, bodies, key)
        parts = self._plans[key]
        if parts is None:
            return [None] * len(bodies)
        hosts = self._pinned.reserve(slot, _offloaded(parts))
        return [
            ActivationStore(
                *planned,
                {place: hosts[part, place] for place in planned.plan.places(Fate.OFFLOAD)},
                self._transfers,
                self._policy.least_bytes,
            )
            for part, planned in enumerate(parts)
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

    def _decide(self, executor: Executor, bodies: Sequence[RegionBody], key: _Key) -> list[Planned] | None:
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
        found = list(map(Planned, inventories, plans))
        if all(fate is Fate.KEEP for plan in plans for fate in plan.fates):
            self._say_nothing_leaves(bucket, inventories)
            return None
        # Before any capture, host memory for all slots must be there; what is held counts.
        self._pinned.check(max(self._slots * sum(_offloaded(found).values()) - self._pinned.nbytes, 0))
        return found

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
        others = other_bytes([(each.others, each.stays) for each in observed]) + static_bytes + self._beyond
        window = int(target_gb * GIB) - others
        if sum(inventory.nbytes for inventory in inventories) <= window:
            return None
        hidden = 0
        if len(inventories) == 1:
            hidden = int(HIDES * observed[0].forward_ms * offload_rate(self._device))
        plans = plans_within(inventories, hidden, policy, window)
        if plans is None:
            raise CaptureError(self._refusal(bucket, smallest_window(inventories, hidden, policy) + others))
        announce(f"bucket {bucket}: {describe(list(map(Planned, inventories, plans)))}")
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


def offloading_of(options: CapturedOptions, fields: Mapping[str, str], manager: Manager) -> RegionOffloading | None:
    """Return what keeps a region's activations, None where they stay in the graphs' memory.

    A memory target may use everything that the options do not rule out.

    Args:
        options: The region's.
        fields: Option -> the name that users know it by.
        manager: Whose executor records the region, in as many slots as it has.
    """
    if not options.moves_activations:
        return None
    unsaid = (OFFLOAD_MODULES, RECOMPUTE) if options.offload_above_gb is not None else ((), ())
    scopes, kinds = (
        frozenset(default if given is None else given)
        for given, default in zip((options.offload, options.recompute), unsaid, strict=True)
    )
    policy = Policy(scopes, kinds, options.offload_above_gb, LEAST_BYTES, fields)
    return RegionOffloading(policy, manager.slots, manager.executor.device)


def static_bytes_of(bodies: Sequence[RegionBody]) -> int:
    """Return the device memory of the buffers that bodies read, shared ones once, and of gradients that they return."""
    buffers = {tensor.data_ptr(): tensor.nbytes for body in bodies for tensor in body.static_tensors}
    return sum(buffers.values()) + sum(body.returned_bytes for body in bodies)


def _offloaded(parts: Sequence[Planned]) -> dict[tuple[int, int], int]:
    """Return the bytes of every storage that goes to the host, by part and place."""
    return {
        (part, place): inventory.seen[place].nbytes
        for part, (inventory, plan) in enumerate(parts)
        for place in plan.places(Fate.OFFLOAD)
    }


def describe(parts: Sequence[Planned]) -> str:
    """Return in words how many bytes are kept, offloaded and recomputed."""
    sizes = Counter[Fate]()
    for inventory, plan in parts:
        for seen, fate in zip(inventory.seen, plan.fates, strict=True):
            sizes[fate] += seen.nbytes
    words = {Fate.KEEP: "kept", Fate.OFFLOAD: "offloaded", Fate.REBUILD: "recomputed"}
    return ", ".join(f"{sizes[fate] / GIB:.2f} GiB {word}" for fate, word in words.items())
