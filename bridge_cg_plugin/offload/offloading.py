"""Offloading and recompute of a region's activations as a user's options say it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from ..announce import announce
from ..graphs.errors import CaptureError
from ..graphs.planning.buckets import Bucket
from ..graphs.recordings.activations import Activations
from ..graphs.recordings.executor import Executor
from ..graphs.recordings.recording import RegionBody
from ..graphs.workload import Manager
from ..options import OFFLOAD_MODULES, RECOMPUTE, CapturedOptions
from .host_memory import GIB, PinnedMemory, Plain
from .inventory import Group, Inventory, starts_of
from .measure import measured_costs
from .observe import Observed, Observer, observed_together
from .planner import Allowed, Costs, fixed_plan, forecast, part_plans, plan_within, smallest_peak
from .schedule import Fate, Plan
from .store import ActivationStore, CudaTransfers, HostTransfers, Transfers

# Slots that are recorded again for less memory before a target is given up.
ATTEMPTS = 4
# A slot may take this much more than its target.
TOLERANCE = 1.01


@dataclass(frozen=True, slots=True)
class Policy:
    """What is asked for.

    Attributes:
        allowed: What may be offloaded and recomputed.
        offload_above_gb: Device memory of a slot, in GiB, that a mix of both keeps to; None does all that is allowed.
        least_bytes: Smallest storage that is offloaded or recomputed.
        fields: Option -> the name that users know it by, for messages.
    """

    allowed: Allowed
    offload_above_gb: float | None = None
    least_bytes: int = 1 << 20
    fields: Mapping[str, str] = field(default_factory=Plain)


def policy_of(options: CapturedOptions, fields: Mapping[str, str]) -> Policy:
    """Return what options ask for. A memory target may use everything that they do not rule out.

    Args:
        options: A region's options.
        fields: Option -> the name that users know it by.
    """
    unsaid = (OFFLOAD_MODULES, RECOMPUTE) if options.offload_above_gb is not None else ((), ())
    scopes, kinds = (
        frozenset(default if given is None else given)
        for given, default in zip((options.offload, options.recompute), unsaid, strict=True)
    )
    allowed = Allowed(scopes, kinds)
    return Policy(allowed, options.offload_above_gb, options.offload_min_bytes, fields)


@dataclass(frozen=True, slots=True)
class _Planned:
    inventory: Inventory
    plan: Plan


# What a plan is for: the bucket, and each part with what the model is: a frozen layer saves less.
type _Key = tuple[Bucket, tuple[tuple[str, int], ...]]


def _key(bodies: Sequence[RegionBody]) -> _Key:
    return bodies[0].bucket, tuple((body.name, body.state) for body in bodies)


class RegionOffloading:
    """See `graphs.recordings.offloading`: keeps the activations of a region, or of all parts of a chain.

    Args:
        policy: What is asked for.
        slots: Slots of the region, all of which need host memory.
        device: Where the region runs.
    """

    def __init__(self, policy: Policy, slots: int, device: torch.device) -> None:
        self._policy, self._slots = policy, slots
        self._pinned = PinnedMemory(device.type == "cuda", policy.fields)
        self._transfers: Transfers = CudaTransfers(device) if device.type == "cuda" else HostTransfers()
        self._plans: dict[_Key, _Planned | None] = {}
        self._looked: dict[_Key, tuple[Observed, Costs | None]] = {}
        # Bytes that pools were seen to take beyond what was planned, and how often that was.
        self._beyond = self._excesses = 0

    @property
    def pinned_bytes(self) -> int:
        """See `Offloading`."""
        return self._pinned.nbytes

    @property
    def rebuild_ms(self) -> dict[Group, float]:
        """Time to make a storage of each group again over its bytes, in ms, in the bucket that was looked at first."""
        return next((dict(observed.rebuild_ms) for observed, _ in self._looked.values()), {})

    def prepare(self, executor: Executor, body: RegionBody, slot: int) -> Activations | None:
        """See `Offloading`. A bucket's first slot decides for all."""
        (kept,) = self.prepare_chain(executor, [body], slot)
        return kept

    def prepare_chain(
        self, executor: Executor, bodies: Sequence[RegionBody], slot: int
    ) -> Sequence[Activations | None]:
        """See `ChainOffloading`. A bucket's first slot decides for all."""
        key = _key(bodies)
        if key not in self._plans:
            self._plans[key] = self._decide(executor, bodies)
        planned = self._plans[key]
        if planned is None:
            return [None] * len(bodies)
        inventory, parts = planned.inventory, planned.inventory.each
        sizes = {place: inventory.seen[place].nbytes for place in planned.plan.places(Fate.OFFLOAD)}
        hosts = self._pinned.reserve(slot, sizes)
        plans = zip(starts_of(parts), parts, part_plans(inventory, planned.plan), strict=True)
        return [self._store(part, plan, hosts, start) for start, part, plan in plans]

    def _store(self, part: Inventory, plan: Plan, hosts: Mapping[int, Tensor], start: int) -> ActivationStore:
        """Return what keeps the activations of a part whose first storage has a place among those of all."""
        own = {place: hosts[start + place] for place in plan.places(Fate.OFFLOAD)}
        return ActivationStore(part, plan, own, self._transfers, self._policy.least_bytes)

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

    def _decide(self, executor: Executor, bodies: Sequence[RegionBody]) -> _Planned | None:
        observed = self._look(executor, bodies)
        target_gb = self._policy.offload_above_gb
        if target_gb is None:
            plan: Plan | None = fixed_plan(observed.inventory, self._policy.allowed)
        else:
            plan = self._within_target(executor, bodies, target_gb)
        if plan is None:
            return None
        if all(fate is Fate.KEEP for fate in plan.fates):
            self._say_nothing_leaves(bodies[0].bucket, observed.inventory)
            return None
        self._check_host(observed.inventory, plan)
        return _Planned(observed.inventory, plan)

    def _look(self, executor: Executor, bodies: Sequence[RegionBody]) -> Observed:
        """Return what bodies save and use, from one look at each."""
        key = _key(bodies)
        if key not in self._looked:
            observed = observed_together([self._seen(executor, body) for body in bodies])
            for kind, count in observed.refused.items():
                announce(f"{count} tensors of kind {kind} are not recomputed: that does not give them back to the bit")
            self._looked[key] = observed, None
        return self._looked[key][0]

    def _seen(self, executor: Executor, body: RegionBody) -> Observed:
        observer = Observer(executor.device, self._policy.least_bytes)
        executor.observe(body, observer)
        return observer.observed()

    def _costs(self, executor: Executor, bodies: Sequence[RegionBody]) -> Costs:
        observed, costs = self._looked[_key(bodies)]
        if costs is None:
            costs = measured_costs(executor, bodies, observed)
            self._looked[_key(bodies)] = observed, costs
        return costs

    def _within_target(self, executor: Executor, bodies: Sequence[RegionBody], target_gb: float) -> Plan | None:
        """Return the fastest plan that keeps to the target, None where nothing need be done."""
        bucket, allowed = bodies[0].bucket, self._policy.allowed
        observed = self._look(executor, bodies)
        inventory, others = observed.inventory, observed.others + static_bytes_of(bodies) + self._beyond
        window = int(target_gb * GIB) - others
        if inventory.nbytes <= window:
            return None
        costs = self._costs(executor, bodies)
        plan = plan_within(inventory, costs, allowed, window)
        if plan is None:
            raise CaptureError(self._refusal(bucket, smallest_peak(inventory, costs, allowed) + others))
        expected = forecast(inventory, plan, costs)
        announce(
            f"bucket {bucket}: {describe(inventory, plan)}; {expected.ms:.1f} ms expected beside "
            f"{costs.forward_ms + costs.backward_ms:.1f} ms with all activations kept, copies at "
            f"{costs.offload_gbps:.0f} and {costs.load_gbps:.0f} GB/s"
        )
        return plan

    def _refusal(self, bucket: Bucket, least: int) -> str:
        names, works_gb = self._policy.fields, ceil(100 * least / GIB) / 100
        return (
            f"{names['offload_above_gb']}={self._policy.offload_above_gb:g}: bucket {bucket} needs at least "
            f"{works_gb:.2f} GiB a slot; raise it, take a smaller largest bucket, or allow more in "
            f"{names['offload']} and {names['recompute']}"
        )

    def _say_nothing_leaves(self, bucket: Bucket, inventory: Inventory) -> None:
        """Say so once where what was asked for moves nothing of the largest bucket."""
        if self._plans:
            return
        there = ", ".join(sorted({seen.scope for seen in inventory.seen})) or "none"
        names = self._policy.fields
        announce(
            f"{names['offload']} and {names['recompute']} move nothing of bucket {bucket}: parts that save tensors of "
            f"{self._policy.least_bytes} bytes or more: {there}"
        )

    def _check_host(self, inventory: Inventory, plan: Plan) -> None:
        """Make sure before any capture that all slots' host memory can be had; what is held counts."""
        needed = self._slots * sum(inventory.seen[place].nbytes for place in plan.places(Fate.OFFLOAD))
        self._pinned.check(max(needed - self._pinned.nbytes, 0))


def offloading_of(options: CapturedOptions, fields: Mapping[str, str], manager: Manager) -> RegionOffloading | None:
    """Return what keeps a region's activations, None where they stay in the graphs' memory.

    Args:
        options: The region's.
        fields: Option -> the name that users know it by.
        manager: Whose executor records the region, in as many slots as it has.
    """
    if not options.moves_activations:
        return None
    return RegionOffloading(policy_of(options, fields), manager.slots, manager.executor.device)


def static_bytes_of(bodies: Sequence[RegionBody]) -> int:
    """Return the device memory of the buffers that bodies read, shared ones once, and of gradients that they return."""
    buffers = {tensor.data_ptr(): tensor.nbytes for body in bodies for tensor in body.static_tensors}
    return sum(buffers.values()) + sum(body.returned_bytes for body in bodies)


def describe(inventory: Inventory, plan: Plan) -> str:
    """Return in words how many bytes are kept, offloaded and recomputed."""
    parts = []
    for fate, words in ((Fate.KEEP, "kept"), (Fate.OFFLOAD, "offloaded"), (Fate.REBUILD, "recomputed")):
        size = sum(inventory.seen[place].nbytes for place in plan.places(fate))
        parts.append(f"{size / GIB:.2f} GiB {words}")
    return ", ".join(parts)
