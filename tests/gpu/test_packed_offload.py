"""Packed-sequence graphs whose activations leave the device: losses, gradients, and packs that did not fit before.

The packs that did not fit run default algorithms: cuDNN's deterministic backward takes 64 GiB of workspace for each
graph of them, so eager would not fit either.
"""

import gc

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import Arena
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tower import relative

from .common import ORDERS, memories, ordered, poison, spoil
from .packs import BUCKETS, Trained, assert_eagers, assert_within_noise, graphs_on

LONG = (4000, 300, 2500, 1392)
# What eager differs from itself by is measured over packs of other tokens.
PACKS = 4
DENSE = lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)
EXPERTS = lm.Shape(layers=4, hidden=1024, heads=8, ffn=768, experts=16)
SHORT = ((1024,), (300, 400), (1, 900, 20, 800))
LAST_EXPERTS = "layers.3.mlp.experts"
# How much farther from replays that keep all than these from each other a gradient may be.
NOISE = 2
OFFLOAD, RECOMPUTE, TARGET = (f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))
# A model's configuration keeps what a test said: each says all.
KEPT = dict.fromkeys((OFFLOAD, RECOMPUTE, TARGET))
BOTH = {**KEPT, OFFLOAD: "all", RECOMPUTE: "all"}


@pytest.fixture(scope="module")
def gpt(tower_module):
    with parity.deterministic():  # a fixture of a module comes before those of a test
        return Trained(lm.build_model(DENSE))


@pytest.fixture(scope="module")
def experts(tower_module):
    with parity.deterministic():
        return Trained(lm.build_model(EXPERTS))


def test_losses_and_gradients_are_eagers(gpt, deterministic_algorithms):
    with graphs_on(gpt.model, lm.make_pack((500, 200)), **BOTH) as graphs:
        for lengths in SHORT:
            assert_eagers(gpt, graphs, lm.make_pack(lengths), str(lengths))
        statistics = graphs.statistics()
        assert not statistics.fallbacks and statistics.pinned_bytes > 0


@pytest.mark.parametrize("kept", [KEPT, BOTH], ids=["kept", "offloaded"])
def test_any_order_takes_as_much_and_equals_eager(gpt, deterministic_algorithms, monkeypatch, kept):
    taken, buckets = {}, list(range(384, 2817, 128))
    wanted = {**kept, "cuda_graph_packed_slots": 1}
    for order in ORDERS:
        ordered(monkeypatch, order)
        with graphs_on(gpt.model, lm.make_pack((200,)), **wanted, cuda_graph_packed_buckets=buckets) as graphs:
            (memory,) = memories(graphs)
            assert isinstance(memory, Arena)
            taken[order] = memory.nbytes
            for lengths in SHORT:
                spoil(graphs)
                assert_eagers(gpt, graphs, lm.make_pack(lengths), f"{order}, {lengths}", buckets)
    with graphs_on(gpt.model, lm.make_pack((200,)), **wanted, cuda_graph_packed_buckets=buckets[-1:]) as graphs:
        assert max(taken.values()) <= 1.01 * memories(graphs)[0].nbytes, taken


def replayed(trained, packs, modules=(), buckets=BUCKETS, **options):
    """Return what graphs of all layers, or of parts of them, give for packs, over poisoned buffers, and statistics."""
    further = {"cuda_graph_packed_slots": 2} if modules else {"cuda_graph_packed_gradient_accumulation_fusion": True}
    wanted = {**KEPT, "cuda_graph_packed_buckets": buckets, **further, **options}
    with graphs_on(trained.model, packs[0], modules=modules, **wanted) as graphs:
        found = []
        for pack in packs:
            poison(graphs)
            found.append(trained.results(pack))
        statistics = graphs.statistics()
        assert statistics.replays == len(packs) * len(graphs._regions) and not statistics.fallbacks, statistics
        return found, statistics


@pytest.mark.first
@pytest.mark.parametrize(
    "modules, options",
    [((), {**KEPT, OFFLOAD: "all"}), ((), BOTH), (("attn", "moe_router"), BOTH)],
    ids=["layers-offload", "layers-both", "attn,moe_router-both"],
)
def test_packs_with_experts_give_what_graphs_that_keep_all_give(experts, deterministic_algorithms, modules, options):
    packs = [lm.make_pack(lengths) for lengths in SHORT]
    kept, _ = replayed(experts, packs, modules)
    found, statistics = replayed(experts, packs, modules, **options)
    assert all(map(parity.same, found, kept)) and statistics.pinned_bytes > 0


def test_packs_with_experts_keep_a_memory_target(tower_module):
    """Attention's backward adds in any order here: what comes before it in the backward is equal to the bit."""
    experts = Trained(lm.build_model(EXPERTS))
    packs = [lm.make_pack(LONG, seed) for seed in range(PACKS)]
    buckets = [packs[0].tokens]
    kept, all_kept = replayed(experts, packs, buckets=buckets)
    again, _ = replayed(experts, packs, buckets=buckets)
    target = 0.6 * all_kept.memory_bytes
    found, statistics = replayed(experts, packs, buckets=buckets, **{TARGET: target / 2**30})
    taken = [s.memory_bytes / 2**30 for s in (all_kept, statistics)]
    print(f"all kept {taken[0]:.3f} GiB, with a target of {target / 2**30:.3f} GiB {taken[1]:.3f} GiB")
    assert statistics.memory_bytes <= 1.05 * target
    before = [place for place, name in enumerate(experts.names) if LAST_EXPERTS in name]
    assert before
    for (losses, gradients), (right, others) in zip(found, kept, strict=True):
        assert torch.equal(losses, right)
        assert all(torch.equal(gradients[place], others[place]) for place in before)
    assert farthest_gradient(found, kept) <= NOISE * farthest_gradient(again, kept)


def farthest_gradient(results, others):
    """Return how far the gradients of results are from those of others, at most over all packs."""
    return max(max(map(relative, one, other)) for (_, one), (_, other) in zip(results, others, strict=True))


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
    settings = {"cuda_graph_packed_buckets": buckets, **KEPT}
    with graphs_on(trained.model, pack, **settings) as graphs:
        one = graphs.statistics().memory_bytes
    settings["cuda_graph_packed_slots"] = 4
    try:
        limited(3 * one)
        said = failure(trained.model, pack, settings)
        assert said is not None and "OutOfMemory" in said, said
        limited(3 * one)
        target = 0.45 * one / 2**30
        with graphs_on(trained.model, pack, **{**settings, TARGET: target}) as graphs:
            statistics = graphs.statistics()
            print(f"one slot {one / 2**30:.2f} GiB, four {statistics.memory_bytes / 2**30:.2f} GiB with a target")
            assert statistics.memory_bytes <= 4 * 1.02 * target * 2**30
            torch.cuda.set_per_process_memory_fraction(1.0)  # eager steps, and the results that are kept of them
            packs = ((f"tokens {seed}", lm.make_pack(LONG, seed)) for seed in range(PACKS))
            assert_within_noise(trained, graphs, packs, buckets)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_parts_of_layers_keep_one_memory_target(tower_module):
    """Parts share a slot's memory. Attention's backward, in one order, takes 32 GiB at this length: here in any."""
    trained = Trained(lm.build_model(DENSE))
    packs = [lm.make_pack(LONG, seed) for seed in range(PACKS)]
    buckets = [packs[0].tokens]
    kept, apart = replayed(trained, packs, ("attn",), buckets)
    again, shared = replayed(trained, packs, ("attn",), buckets, **{TARGET: 1000.0})
    target = 0.8 * shared.memory_bytes / 2  # of one slot
    found, statistics = replayed(trained, packs, ("attn",), buckets, **{TARGET: target / 2**30})
    taken = [s.memory_bytes / 2**30 for s in (apart, shared, statistics)]
    print("apart {:.3f} GiB, shared {:.3f}, with a target {:.3f}".format(*taken), f"of {2 * target / 2**30:.3f} GiB")
    assert statistics.memory_bytes <= 1.05 * 2 * target < shared.memory_bytes < apart.memory_bytes
    assert all(torch.equal(losses, others) for (losses, _), (others, _) in zip(found, kept, strict=True))
    assert farthest_gradient(found, kept) <= max(NOISE * farthest_gradient(again, kept), 1e-6)
