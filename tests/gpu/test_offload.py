"""Offloading and recompute inside real graphs: equal to the bit, less memory, streams and events in order."""

import gc
import time

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor
from bridge_cg_plugin.offload import host
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Fate, Policy
from bridge_cg_plugin.offload.registry import OTHER
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
from scripts.performance import measure
from tests.saving import Saver, SaverProgram, batch_of, results

from ..regions import new_region

LEAST_BYTES = 65536

GRID = [(1, 32, 32), (1, 28, 28)]
EVERYTHING = {"offload": ("attention", "mlp", "layernorm", "merger", "other")}
REBUILD = {"recompute": ("layernorm", "gelu", "linear")}
POLICIES = {
    "offload": EVERYTHING,
    "recompute": REBUILD,
    "both": {**EVERYTHING, **REBUILD},
}


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


@pytest.mark.parametrize(
    "kernels, name",
    [
        *(("fast", name) for name in POLICIES if name != "both"),
        pytest.param("fast", "both", marks=pytest.mark.first),
        ("exact", "both"),
    ],
)
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
        assert all(map(torch.equal, outputs, found[0][0]))
        assert all(map(torch.equal, gradients, found[0][1]))


def test_everything_that_is_known_is_recomputed_to_the_bit(tower_module, model, grads, graphs_of, capsys):
    helper = graphs_of(buckets=(1856,), max_frames=2, **POLICIES["both"])
    assert "not recomputed" not in capsys.readouterr().out
    (planned,) = next(iter(helper.graphs._regions[0].chain.offloading._plans.values()))
    layers = len(model.decoder.layers)
    rebuilt = [planned.inventory.seen[place] for place in planned.plan.places(Fate.REBUILD)]
    groups = [(seen.kind, seen.scope) for seen in rebuilt]
    print({group: groups.count(group) for group in groups})
    assert groups.count(("layernorm", "layernorm")) >= 2 * layers
    assert groups.count(("gelu", "mlp")) >= layers
    assert groups.count(("linear", "mlp")) >= layers
    assert groups.count(("linear", "attention")) >= layers


@pytest.fixture
def deep(tower_module):
    """Return a tower of so many layers that what is on the way for one or two is little beside all."""
    return tower_module.build_tower(layers=24)


def test_memory_is_less_and_a_target_is_kept(deep):
    def memory(**options):
        gc.collect()
        torch.cuda.empty_cache()
        settings = {"impl": "transformer_engine", "strict": True, "slots": 1, "max_frames": 1}
        helper = VisionTECudaGraphHelper(
            deep, deep.config, options=VisionGraphOptions(buckets=(4096,), **settings, **options)
        )
        helper.create_cudagraphs()
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


def test_two_hundred_steps_take_no_more_memory(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=(1856,), slots=1, max_frames=2, **POLICIES["both"])
    batch = tower_module.make_batch(GRID, model)
    taken = []
    for step in range(200):
        tower_module.step(model, batch)
        if step in (5, 199):
            gc.collect()
            torch.cuda.synchronize()
            host = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host))
    assert taken[0] == taken[1]
    assert helper.graphs.statistics().replays == 200


def test_host_memory_is_given_back(tower_module, model, grads, graphs_of):
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    helper = graphs_of(buckets=(1856,), max_frames=2, **EVERYTHING)
    pinned = helper.graphs.statistics().pinned_bytes
    assert pinned > 0
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= before + pinned
    tower_module.step(model, tower_module.make_batch(GRID, model))
    helper.delete_cuda_graphs()
    gc.collect()
    torch._C._host_emptyCache()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before


# The engine by itself: a small program that saves tensors of every kind.


def saver_region(model, tokens=256, slots=1, offloaded=True, **executor):
    """Capture a saver on the GPU, all that it saves offloaded."""
    made = CudaGraphExecutor(**executor)
    policy = Policy(frozenset({OTHER}), frozenset(), least_bytes=1)
    keeper = RegionOffloading(policy, slots, made.device) if offloaded else None
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


def test_hooks_run_once_around_the_whole_warm_up(tower_module):
    calls, model = [], Saver(layers=2).cuda()
    original = model.forward
    model.forward = lambda *args: (calls.append("forward"), original(*args))[1]
    saver_region(model, pre_warmup_hook=lambda: calls.append("before"), post_warmup_hook=lambda: calls.append("after"))
    assert calls.count("before") == calls.count("after") == 1
    assert calls[0] == "before" and calls.index("after") == 3  # two passes


def test_an_event_needs_a_stream_of_its_own():
    with pytest.raises(ValueError, match="cuda_graph_event"):
        CudaGraphExecutor(cuda_graph_event=torch.cuda.Event(external=True))


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


@pytest.mark.parametrize("way", ["into", "out of"])
def test_a_missing_wait_is_seen(tower_module, monkeypatch, way):
    """Without either wait the result is wrong, so the tests above would fail without them."""
    model, side = Saver(layers=4).cuda(), torch.cuda.Stream()
    region = saver_region(model, cuda_graph_stream=side)
    batch = batch_of(256, 1, "cuda")
    expected = results(model, batch, model.parameters())
    nothing = torch.zeros_like(batch)
    region.run(nothing.requires_grad_())
    torch.cuda.synchronize()
    # The stream whose wait is left out would have to wait for a long kernel.
    if way == "into":
        monkeypatch.setattr(side.__class__, "wait_stream", lambda self, other: None)
        torch.cuda._sleep(400_000_000)
    else:
        monkeypatch.setattr(side.__class__, "wait_stream", lambda self, other: None)
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
    out = region.run(batch)[0].detach().clone()
    monkeypatch.undo()
    torch.cuda.synchronize()
    assert not torch.equal(out, expected[0])
    assert torch.equal(region.run(batch)[0], expected[0])


def test_graphs_without_copies_replay_on_the_main_stream_and_wait_for_nothing(tower_module, monkeypatch):
    """A graph that copies nothing has no node of the event, so what its replays wait for would be another's."""
    model, waits = Saver(layers=4).cuda(), []
    event = torch.cuda.Event(external=True)
    region = saver_region(model, offloaded=False, cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=event)
    batch = batch_of(256, 1, "cuda")
    expected = results(model, batch, model.parameters())
    for name in ("wait_stream", "wait_event"):
        monkeypatch.setattr(torch.cuda.Stream, name, lambda self, other: waits.append(other))
    found = results(region.run, batch, model.parameters())
    assert region.statistics.replays == 1 and not waits
    assert all(map(torch.equal, found, expected))


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
    settings = {"impl": "transformer_engine", "strict": True, "slots": 1, "max_frames": 1}
    options = VisionGraphOptions(buckets=(4096,), offload=("attention",), **settings)
    tower_module.MainGrads(deep)
    helper = VisionTECudaGraphHelper(deep, deep.config, options=options)
    helper.create_cudagraphs()
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


def test_too_little_host_memory_is_an_error_before_any_capture(tower_module, model, graphs_of, monkeypatch):
    captures = []
    began = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "capture_begin", lambda self, *a, **k: captures.append(began(self, *a, **k))
    )
    started = time.perf_counter()
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 24)
    with pytest.raises(CaptureError, match="the host has 0.0 GiB for this process"):
        graphs_of(buckets=(1856,), max_frames=2, **EVERYTHING)
    assert not captures and time.perf_counter() - started < 60
