"""Options of offloading and recompute on Bridge's tower, through the reference executor."""

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import SlotMemory
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.recordings.recording import STAY
from bridge_cg_plugin.graphs.reports import metrics
from bridge_cg_plugin.offload import host, offloading
from bridge_cg_plugin.offload.plan import Fate
from bridge_cg_plugin.options import OFFLOAD_MODULES

from .towers import graphs_on, new_tower, results

LEAST_BYTES = 1024

ROWS = [(1, 8, 8), (2, 4, 8)]
SETTINGS = {"buckets": (128,)}


def planned(graphs):
    """Return the one plan of a tower's graphs with its inventory."""
    ((found,),) = graphs._regions[0].chain.offloading._plans.values()
    return found


@pytest.mark.parametrize("scopes", [("attention",), ("mlp", "layernorm"), OFFLOAD_MODULES])
def test_only_what_was_named_leaves_and_nothing_changes(scopes):
    tower = new_tower()
    with graphs_on(tower, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, offload=scopes, slots=2, **SETTINGS) as graphs:
        for _ in range(2):
            outputs, gradients = results(tower, ROWS)
            assert all(map(torch.equal, outputs, expected[0]))
            assert all(map(torch.equal, gradients, expected[1]))
        found = planned(graphs)
        offloaded = found.places(Fate.OFFLOAD)
        assert {found.inventory.seen[place].scope for place in offloaded} == set(scopes)
        assert all(found.inventory.seen[p].scope not in scopes for p in found.places(Fate.KEEP))
        statistics = graphs.statistics()
        assert statistics.pinned_bytes >= 2 * sum(found.inventory.seen[place].nbytes for place in offloaded)
        assert "offloaded activations:" in graphs.report()
        assert metrics(statistics, "v")["v/pinned_gb"] == statistics.pinned_bytes / 2**30
        assert not statistics.fallbacks


def target_of(share: float) -> float:
    """Return a target in GiB that static buffers, gradients and so large a part of the tower's activations fit."""
    tower = new_tower()
    with graphs_on(tower, offload=("attention",), **SETTINGS) as graphs:
        statistics = graphs.statistics()
        static = statistics.static_bytes + statistics.gradient_bytes
        return (share * planned(graphs).inventory.nbytes + static) / 2**30


def test_host_memory_for_all_slots_is_looked_for_before_the_first_capture(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 20)
    recorded = []
    tower = new_tower()
    record = ReferenceExecutor.record_forward
    monkeypatch.setattr(ReferenceExecutor, "record_forward", lambda self, *a: recorded.append(1) or record(self, *a))
    with (
        pytest.raises(CaptureError, match=r"HostMemoryError.*vision_cuda_graph_slots|HostMemoryError.*fewer slots"),
        graphs_on(tower, offload=OFFLOAD_MODULES, slots=64, **SETTINGS),
    ):
        pass
    assert not recorded


class Filled(SlotMemory):
    """The memory of a slot."""

    def __init__(self, executor) -> None:
        self._executor = executor

    @property
    def nbytes(self):
        taken = self._executor.taken
        return taken[-1] - self._executor.static if taken else 0

    def keep(self, nbytes):
        self._executor.dropped += not nbytes


class FilledMemory(ReferenceExecutor):
    """Its memory takes more than the activations of a plan, as blocks leave gaps."""

    def __init__(self, gaps: int, least: int = 0) -> None:
        super().__init__()
        self.gaps, self.least, self.taken, self.dropped = gaps, least, [], 0
        self.static = 0

    def new_memory(self):
        return Filled(self)

    def record_forward(self, body, pool):
        if body.activations is not STAY:
            self.static = offloading.static_bytes_of([body])
            planned = body.activations._plan.window + offloading.static_bytes_of([body])
            self.taken.append(max(planned + self.gaps, self.least))
        return super().record_forward(body, pool)


def test_memory_with_gaps_is_recorded_again_with_less_in_it():
    tower, target = new_tower(), target_of(0.7)
    with graphs_on(tower, **SETTINGS):
        expected = results(tower, ROWS)
    executor = FilledMemory(gaps=int(0.1 * target * 2**30))
    with graphs_on(tower, executor=executor, offload_above_gb=target, slots=2, **SETTINGS):
        outputs, gradients = results(tower, ROWS)
    first, second, other_slot = executor.taken
    assert first > 1.05 * target * 2**30 and second == other_slot <= 1.01 * target * 2**30
    assert executor.dropped == 1
    assert all(map(torch.equal, outputs, expected[0]))
    assert all(map(torch.equal, gradients, expected[1]))
