"""Offloading and recompute inside real graphs: equal to the bit, less memory, streams and events in order."""

import gc

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Policy
from bridge_cg_plugin.offload.registry import OTHER
from scripts.performance import measure
from tests.saving import Saver, SaverProgram, batch_of, results

from ..regions import new_region
from .common import equal, vision_graphs

GRID = [(1, 32, 32), (1, 28, 28)]
EVERYTHING = {"offload": ("attention", "mlp", "layernorm", "merger", "other")}
REBUILD = {"recompute": ("layernorm", "gelu", "linear")}
STEPS = 40
POLICIES = {"offload": EVERYTHING, "both": {**EVERYTHING, **REBUILD}}


def steps(tower_module, model, grads, batches):
    """Run all forwards, then all backwards; returns outputs and gradients."""
    grads.zero()
    made = [tower_module.forward(model, batch) for batch in batches]
    for outputs, batch in zip(made, batches, strict=True):
        torch.autograd.backward(outputs, batch.gradients)
    return [o.detach().clone() for outputs in made for o in outputs], grads.copy()


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernels, name", [pytest.param("fast", "both", marks=pytest.mark.first), ("exact", "offload")])
def test_outputs_and_gradients_are_equal_to_the_bit(
    deterministic, tower_module, graphs_of, model, grads, kernels, name
):
    policy = POLICIES[name]
    batches = [tower_module.make_batch(GRID, model, seed=seed) for seed in range(2)]
    found = []
    for options in ({}, policy):
        helper = graphs_of(buckets=(1856,), slots=2, max_frames=2, kernels=kernels, **options)
        found += [steps(tower_module, model, grads, batches) for _ in range(2)]
        statistics = helper.graphs.statistics()
        assert not statistics.fallbacks and statistics.replays == 4
        assert (statistics.pinned_bytes > 0) == ("offload" in options)
        print(f"{statistics.memory_bytes / 2**20:.0f} MiB device, {statistics.pinned_bytes / 2**20:.0f} MiB host")
        helper.delete_cuda_graphs()
    for outputs, gradients in found[1:]:
        assert equal(outputs, found[0][0]) and equal(gradients, found[0][1])


@pytest.fixture
def deep(tower_module):
    """Return a tower of so many layers that what is on the way for one or two is little beside all."""
    return tower_module.build_tower(layers=24)


def test_memory_is_less_and_a_target_is_kept(deep):
    def memory(**options):
        gc.collect()
        torch.cuda.empty_cache()
        helper = vision_graphs(deep, buckets=(4096,), slots=1, max_frames=1, **options)
        statistics = helper.graphs.statistics()
        helper.delete_cuda_graphs()
        return statistics.memory_bytes / 2**30, statistics.pinned_bytes / 2**30

    everything, _ = memory()
    offloaded, host = memory(offload=EVERYTHING["offload"])
    rebuilt, none = memory(recompute=REBUILD["recompute"])
    target = 0.45 * everything
    mixed, _ = memory(offload_above_gb=target)
    print(
        f"kept {everything:.2f} GiB, offloaded {offloaded:.2f} ({host:.2f} host), again {rebuilt:.2f}, mix {mixed:.2f}"
    )
    assert offloaded < 0.6 * everything and host > 0
    assert rebuilt < 0.6 * everything and none == 0
    assert mixed <= 1.02 * target


def test_steps_take_no_more_memory_and_the_hosts_is_given_back(tower_module, model, grads, graphs_of):
    def host_bytes():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    torch._C._host_emptyCache()
    before = host_bytes()
    helper = graphs_of(buckets=(1856,), slots=1, max_frames=2, **POLICIES["both"])
    pinned = helper.graphs.statistics().pinned_bytes
    assert pinned > 0 and host_bytes() >= before + pinned
    batch = tower_module.make_batch(GRID, model)
    taken = []
    for step in range(STEPS):
        tower_module.step(model, batch)
        if step in (5, STEPS - 1):
            gc.collect()
            torch.cuda.synchronize()
            taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_bytes()))
    assert taken[0] == taken[1]
    assert helper.graphs.statistics().replays == STEPS
    helper.delete_cuda_graphs()
    gc.collect()
    torch._C._host_emptyCache()
    assert host_bytes() <= before


# The engine by itself: a small program that saves tensors of every kind.


def saver_region(model, tokens=256, slots=1, **executor):
    """Capture a saver on the GPU, all that it saves offloaded."""
    made = CudaGraphExecutor(**executor)
    keeper = RegionOffloading(Policy(frozenset({OTHER}), frozenset(), least_bytes=1), slots, made.device)
    region = new_region(SaverProgram(model), made, [Bucket(tokens)], slots=slots, offloading=keeper)
    region.capture()
    return region


def test_every_dtype_and_view_comes_back(tower_module):
    model = Saver(layers=4).cuda()
    region = saver_region(model, slots=2)
    assert model.log["returned"].layouts == model.log["saved"].layouts
    assert model.log["returned"].groups == model.log["saved"].groups
    batches = [batch_of(256, seed, "cuda") for seed in range(4)]
    expected = [results(model, batch, model.parameters()) for batch in batches]
    for batch, wanted in zip(batches, expected, strict=True):
        assert all(map(torch.equal, results(region.run, batch, model.parameters()), wanted))
    first, second = (region.run(batch)[0] for batch in batches[:2])
    for out, batch, wanted in ((first, batches[0], expected[0]), (second, batches[1], expected[1])):
        assert all(map(torch.equal, results(lambda _, o=out: o, batch, model.parameters()), wanted))
    assert not region.statistics.fallbacks


@pytest.mark.parametrize("with_event", [False, True], ids=["end", "event"])
def test_replays_on_a_stream_of_their_own(tower_module, with_event):
    model = Saver(layers=4).cuda()
    event = torch.cuda.Event(external=True) if with_event else None
    region = saver_region(model, cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=event)
    for seed in range(5):
        batch = batch_of(256, seed, "cuda")
        expected = results(model, batch, model.parameters())
        torch.cuda._sleep(20_000_000)  # the replay must wait for the main stream
        assert all(map(torch.equal, results(region.run, batch, model.parameters()), expected))
    assert region.statistics.replays == 5


class Wide(nn.Module):
    """Little work that saves much: its copies take far longer than it does."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))
        self.tensors, self.elements = tensors, elements

    def forward(self, x):
        x = x @ self.weight
        total = x
        for index in range(self.tensors):
            large = x.view(-1)[:1].expand(self.elements) + index
            total = total + large.tanh()[:1]
        return total


def test_the_main_stream_goes_on_from_the_event_while_copies_run(tower_module):
    """Two regions alike, with and without the event: the main stream is let go while the last copies run.

    The second tensor may be on its way once the first has arrived, so the forward waits for half of the copies only.
    """
    waited = {}
    for name, event in (("end", None), ("event", torch.cuda.Event(external=True))):
        model = Wide(tensors=2, elements=64 << 20).cuda()
        region = saver_region(model, tokens=8, cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=event)
        batch = batch_of(8, 0, "cuda")
        expected = results(model, batch, model.parameters())
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began, reached = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            out = region.run(batch)[0]
            reached.record()
            found = torch.autograd.grad(out.sum(), [model.weight, batch])
            torch.cuda.synchronize()
            times.append(began.elapsed_time(reached))
        out = model(batch)
        assert all(map(torch.equal, found, torch.autograd.grad(out.sum(), [model.weight, batch])))
        assert torch.equal(region.run(batch)[0], expected[0])
        waited[name] = min(times)
        print(name, times, region.statistics.pinned_bytes / 2**20, "MiB")
        region.reset()
    assert waited["event"] < 0.7 * waited["end"]


def test_copies_run_beside_kernels(tower_module, deep):
    tower_module.MainGrads(deep)
    helper = vision_graphs(deep, buckets=(4096,), slots=1, max_frames=1, offload=("attention",))
    batch = tower_module.make_batch([(1, 64, 64)], deep)
    tower_module.step(deep, batch)
    spans = measure.spans(lambda: tower_module.step(deep, batch))
    assert not helper.graphs.statistics().fallbacks
    helper.delete_cuda_graphs()
    copies = [span for span in spans if "DtoH" in span[2] or "HtoD" in span[2]]
    kernels = [span for span in spans if not span[2].startswith(("Memcpy", "Memset"))]
    busy, moving = (measure.kernels_of(some).busy_ms for some in (kernels, copies))
    beside = busy + moving - measure.kernels_of([*kernels, *copies]).busy_ms
    print(moving, beside)
    assert moving > 0 and beside > 0.5 * moving
