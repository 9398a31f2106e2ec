"""Options of offloading and recompute on Bridge's tower, through the reference executor."""

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.reports import metrics
from bridge_cg_plugin.offload import host
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
