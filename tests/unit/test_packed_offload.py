"""Packed-sequence graphs of all layers whose activations leave, through the reference executor."""

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.offload import host_memory
from bridge_cg_plugin.offload.schedule import Fate

from .packs import graphs_on, losses_and_gradients, new_model, pack

WARMUP, PACKS = (100, 150, 50), ((30, 180, 77), (300,))
SMALL = {"cuda_graph_packed_tuning": {"offload_min_bytes": 1024}}


@pytest.fixture(scope="module")
def expected(executor_kind):
    """Return a model, and what its graphs give with all activations kept."""
    model = new_model()
    with graphs_on(model, pack(WARMUP)):
        return model, [losses_and_gradients(model, pack(lengths)) for lengths in PACKS]


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph_packed_offload": "all"},
        {"cuda_graph_packed_offload": ["attention"], "cuda_graph_packed_recompute": "all"},
        {"cuda_graph_packed_offload_above_gb": 0.002},
    ],
    ids=["offload", "attention", "target"],
)
def test_losses_and_gradients_are_the_same_to_the_bit(expected, options):
    model, wanted = expected
    with graphs_on(model, pack(WARMUP), **SMALL, **options) as graphs:
        found = [losses_and_gradients(model, pack(lengths)) for lengths in PACKS]
        statistics = graphs.statistics()
        assert statistics.replays == len(PACKS) and not statistics.fallbacks
        assert statistics.pinned_bytes > 0
        planned = next(iter(graphs._regions[0]._offloading._plans.values()))
        scopes = {planned.inventory.seen[place].scope for place in planned.plan.places(Fate.OFFLOAD)}
        assert {"attention", "mlp", "layernorm"} & scopes
    for (losses, gradients), (other_losses, others) in zip(found, wanted, strict=True):
        assert torch.equal(losses, other_losses)
        assert all(map(torch.equal, gradients, others))


def test_messages_name_the_options_of_packed_sequences(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1024)
    model = new_model()
    options = {"cuda_graph_packed_offload": "all", "cuda_graph_packed_strict": True}
    with (
        pytest.raises(CaptureError, match="cuda_graph_packed_recompute"),
        graphs_on(model, pack(WARMUP), **SMALL, **options),
    ):
        pass
