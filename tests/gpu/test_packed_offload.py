"""Packed-sequence graphs whose activations leave the device: losses, gradients, and packs that did not fit before.

The packs that did not fit run default algorithms: cuDNN's deterministic backward takes 64 GiB of workspace for each
graph of them, so eager would not fit either.
"""

import gc

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_tools.benchmarks.models import language_model as lm
from bridge_cg_tools.benchmarks.packed import parity as parity

from .packs import Trained, assert_eagers, assert_within_noise, graphs_on

LONG = (4000, 300, 2500, 1392)
# What eager differs from itself by is measured over packs of other tokens.
PACKS = 4
# A model's configuration keeps what a test said: each says all.
KEPT = dict.fromkeys(f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))
POLICIES = {
    "offload": {**KEPT, "cuda_graph_packed_offload": "all"},
    "recompute": {**KEPT, "cuda_graph_packed_recompute": "all"},
    "both": {**KEPT, "cuda_graph_packed_offload": "all", "cuda_graph_packed_recompute": "all"},
}


@pytest.fixture
def deterministic_algorithms():
    with parity.deterministic():
        yield


@pytest.fixture(scope="module")
def gpt(tower_module):
    with parity.deterministic():  # a fixture of a module comes before those of a test
        return Trained(lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)))


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_losses_and_gradients_are_eagers(gpt, deterministic_algorithms, options):
    with graphs_on(
        gpt.model, lm.make_pack((500, 200)), cuda_graph_packed_tuning={"offload_min_bytes": 65536}, **options
    ) as graphs:
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            assert_eagers(gpt, graphs, lm.make_pack(lengths), str(lengths))
        statistics = graphs.statistics()
        assert not statistics.fallbacks
        assert (statistics.pinned_bytes > 0) == (options["cuda_graph_packed_offload"] is not None)


def limited(memory):
    """Let the process take so many bytes more than it holds now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + memory) / total)


def failure(model, pack, settings):
    """Return what a capture fails with; nothing of it is kept."""
    try:
        lm.new_helper(model, pack, cuda_graph_max_packed_seqs=24, **settings)
    except CaptureError as error:
        return str(error)
    return None


@pytest.mark.alone
def test_packs_that_do_not_fit_train_with_a_memory_target(tower_module):
    trained = Trained(lm.build_model(lm.Shape(layers=8, hidden=2048, heads=16, ffn=6144)))
    pack = lm.make_pack(LONG)
    buckets = [pack.tokens]
    settings = {"cuda_graph_packed_buckets": buckets, "cuda_graph_packed_tuning": {"evaluation": False}, **KEPT}
    with graphs_on(trained.model, pack, **settings) as graphs:
        one = graphs.statistics().memory_bytes
    settings["cuda_graph_packed_tuning"] = {"evaluation": False, "slots": 4}
    try:
        limited(3 * one)
        said = failure(trained.model, pack, settings)
        assert said is not None and "OutOfMemory" in said, said
        limited(3 * one)
        target = 0.45 * one / 2**30
        with graphs_on(trained.model, pack, **{**settings, "cuda_graph_packed_offload_above_gb": target}) as graphs:
            statistics = graphs.statistics()
            print(f"one slot {one / 2**30:.2f} GiB, four {statistics.memory_bytes / 2**30:.2f} GiB with a target")
            assert statistics.memory_bytes <= 4 * 1.02 * target * 2**30
            torch.cuda.set_per_process_memory_fraction(1.0)  # eager steps, and the results that are kept of them
            packs = ((f"tokens {seed}", lm.make_pack(LONG, seed)) for seed in range(PACKS))
            assert_within_noise(trained, graphs, packs, buckets)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
