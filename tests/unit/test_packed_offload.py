"""Packed-sequence graphs of all layers whose activations leave, through the reference executor."""

import re
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.offload import offloading
from bridge_cg_plugin.offload.host import GIB
from bridge_cg_plugin.offload.plan import Fate, Policy, plans_within
from bridge_cg_plugin.offload.store import ActivationStore
from bridge_cg_plugin.options.vision import OFFLOAD_MODULES, RECOMPUTE

from .packs import EXPERTS, ON_CPU, graphs_on, losses_and_gradients, new_model, pack
from .towers import planned, poison

LEAST_BYTES = 1024

WARMUP, PACKS = (100, 150, 50), ((30, 180, 77), (300,))


class Mix:
    """A model with experts, and what its graphs give with all activations kept."""

    def __init__(self, **changes):
        self.model = new_model(**{**EXPERTS, **changes})
        with self.graphs() as graphs:
            self.kept = self.results(graphs)

    @contextmanager
    def graphs(self, **options):
        one = {"cuda_graph_packed_buckets": [320], "cuda_graph_modules": []}
        options |= one
        with ON_CPU(), graphs_on(self.model, pack(WARMUP), **options) as graphs:
            yield graphs

    def results(self, graphs):
        """Return losses and gradients of packs, each over memory that holds NaN."""
        found = []
        for lengths in PACKS:
            poison(graphs, float("nan"))
            losses, gradients = losses_and_gradients(self.model, pack(lengths))
            found += [losses, *gradients]
        assert graphs.statistics().replays == len(PACKS) and not graphs.statistics().fallbacks
        return found

    def assert_kept(self, graphs):
        assert all(map(torch.equal, self.results(graphs), self.kept))


@pytest.fixture
def stores(monkeypatch):
    """Return the stores of recordings in the order in which they were made."""
    made, init = [], ActivationStore.__init__
    monkeypatch.setattr(ActivationStore, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    return made


@pytest.mark.reference_executor
def test_packs_with_experts_keep_any_memory_target(stores):
    mix = Mix(moe_layer_freq=[0, 1])
    for scopes, recomputed in ((["attention"], "all"), ("all", ())):
        with mix.graphs(cuda_graph_packed_offload=scopes, cuda_graph_packed_recompute=recomputed) as graphs:
            mix.assert_kept(graphs)
            assert graphs.statistics().pinned_bytes > 0
            inventory = planned(graphs).inventory
            leaving = {inventory.seen[place].scope for place in planned(graphs).places(Fate.OFFLOAD)}
            assert leaving == {"attention"} if recomputed else {"attention", "mlp", "layernorm"} <= leaving
            (recorded,) = graphs._regions[0].sources.current.recordings.values()
            static = offloading.static_bytes_of([recorded.recording._body])
    _, least = plans_within([inventory], 0, Policy(frozenset(OFFLOAD_MODULES), frozenset(RECOMPUTE)), -1)

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.floats(0.0, 0.99))
    def keeps(share):
        window = least + 1 + share * (inventory.nbytes - least)
        with mix.graphs(cuda_graph_packed_offload_above_gb=(static + window) / GIB) as graphs:
            mix.assert_kept(graphs)
            assert 0 < stores[-1].peak_of_last <= window

    keeps()


def test_a_target_below_what_is_possible_says_what_works():
    mix = Mix()
    said = "cuda_graph_packed_offload_above_gb=1e-05: bucket .* needs at least (.*) GiB a slot"
    options = {"cuda_graph_packed_offload_above_gb": 1e-5}
    with pytest.raises(CaptureError, match=said) as caught, mix.graphs(**options):
        pass
    least = float(re.search(said, str(caught.value))[1])
    with mix.graphs(cuda_graph_packed_offload_above_gb=least) as graphs:
        mix.assert_kept(graphs)
