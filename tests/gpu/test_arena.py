"""Recordings of a slot in memory that all of them use from the beginning, on real graphs."""

import random
import threading

import pytest
import torch

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import Arena, ArenaPool
from bridge_cg_plugin.graphs.recordings.recording import RegionBody

from .common import ORDERS, equal, memories, ordered, spoil

MB = 2**20
BUCKETS = tuple(range(384, 2817, 128))
SETTINGS = {"kernels": "exact", "max_frames": 2}
OFFLOADED = {"offload": ("attention", "mlp"), "recompute": ()}


def grid_of(draw) -> list[tuple[int, int, int]]:
    """Return a mix of images that some bucket holds."""
    return [(1, 2 * draw.randint(9, 16), 2 * draw.randint(9, 16)) for _ in range(draw.randint(1, 2))]


@pytest.fixture
def check(tower_module, model):
    """Return a function that compares a replay's outputs and gradients with eager's."""

    def compare(graphs, grid, seed=0):
        batch = tower_module.make_batch(grid, model, seed=seed)
        found = [output.detach().clone() for output in tower_module.step(model, batch)]
        with graphs.paused(), torch.no_grad():
            assert equal(found, tower_module.forward(model, batch))

    return compare


@pytest.mark.parametrize("kept", [{}, OFFLOADED], ids=["kept", "offloaded"])
def test_any_order_takes_as_much_and_equals_eager(tower_module, model, grads, graphs_of, check, monkeypatch, kept):
    """Nothing that a replay reads is left from before it, so that memory full of NaN makes no difference."""
    taken, draw = {}, random.Random(1)
    for order in ORDERS:
        ordered(monkeypatch, order)
        helper = graphs_of(buckets=BUCKETS, slots=1, **SETTINGS, **kept)
        (memory,) = memories(helper.graphs)
        assert isinstance(memory, Arena)
        taken[order] = memory.nbytes
        for seed in range(30 if order == "as they come" else 6):
            spoil(helper.graphs)
            check(helper.graphs, grid_of(draw), seed)
        assert not helper.graphs.statistics().fallbacks
        helper.delete_cuda_graphs()
    print({order: f"{nbytes / MB:.0f} MiB" for order, nbytes in taken.items()})
    helper = graphs_of(buckets=BUCKETS[-1:], slots=1, **SETTINGS, **kept)
    largest = memories(helper.graphs)[0].nbytes
    assert max(taken.values()) <= 1.01 * largest, (taken, largest)


def test_a_forward_that_is_dropped_while_its_copies_run(tower_module, model, grads, graphs_of):
    """What another bucket replays at once is its own, and its activations come back from the host."""
    helper = graphs_of(buckets=(1024, 2816), slots=1, **SETTINGS, **OFFLOADED)
    batches = [tower_module.make_batch(grid, model, seed=1) for grid in ([(1, 28, 28)], [(1, 40, 44)])]
    for dropped, kept in (batches, batches[::-1]):
        with helper.graphs.paused():
            grads.zero()
            expected, gradients = tower_module.step(model, kept), grads.copy()
        for _ in range(3):
            spoil(helper.graphs)
            grads.zero()
            tower_module.forward(model, dropped)
            assert equal(tower_module.step(model, kept), expected)
            assert tower_module.largest_relative(grads.copy(), gradients) <= 3e-2
    assert helper.graphs.statistics().replays == 12 and not helper.graphs.statistics().fallbacks


def test_two_slots_interleave_and_a_bucket_goes(tower_module, model, grads, graphs_of, check):
    helper = graphs_of(buckets=(512, 1024, 2048), slots=2, **SETTINGS)
    graphs, (region,) = helper.graphs, helper.graphs._regions
    batches = [tower_module.make_batch(grid, model, seed=1) for grid in ([(1, 28, 28)], [(1, 40, 44)])]
    for first, second in (batches, batches[::-1]):
        spoil(graphs)
        grads.zero()
        outputs = [tower_module.forward(model, batch) for batch in (first, second)]
        for each, batch in zip(outputs, (first, second), strict=True):
            torch.autograd.backward(each, batch.gradients)
        found = [[o.detach() for o in each] for each in outputs], grads.copy()
        with graphs.paused():
            grads.zero()
            again = [tower_module.forward(model, batch) for batch in (first, second)]
            for each, batch in zip(again, (first, second), strict=True):
                torch.autograd.backward(each, batch.gradients)
        assert all(map(equal, found[0], again))
        assert tower_module.largest_relative(found[1], grads.copy()) <= 3e-2
    before = memories(graphs)[0].nbytes
    for bucket in [bucket for bucket in region.buckets if bucket.tokens == 2048]:
        region.drop(bucket)
    assert memories(graphs)[0].nbytes < before
    check(graphs, [(1, 28, 28)])
    assert graphs.statistics().replays == 5 and not graphs.statistics().fallbacks


@pytest.mark.first
def test_others_allocate_and_free_during_captures(tower_module, model, grads, graphs_of, check, set_segments):
    set_segments()
    stop, wrong = threading.Event(), []

    def others():
        stream, held = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            while not stop.is_set():
                held.append(torch.full((random.randrange(1, 8) * MB,), 7, dtype=torch.uint8, device="cuda"))
                if len(held) > 8:
                    gone = held.pop(random.randrange(len(held)))
                    wrong.append(not bool((gone == 7).all()))
                    gone.fill_(9)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        helper = graphs_of(buckets=(512, 1024, 768, 2048), **SETTINGS)
        assert isinstance(memories(helper.graphs)[0], Arena)
        for seed in range(6):
            check(helper.graphs, grid_of(random.Random(seed)), seed)
    finally:
        stop.set()
        thread.join()
    assert wrong and not any(wrong)
    assert not helper.graphs.statistics().fallbacks
    assert torch.full((64 * MB,), 7, dtype=torch.uint8, device="cuda").sum().item() == 7 * 64 * MB


def test_a_capture_that_fails_in_the_middle_leaves_memory_as_it_was(tower_module, model, graphs_of, check, monkeypatch):
    helper = graphs_of(buckets=(512,), strict=False, slots=1, **SETTINGS)
    graphs, (region,) = helper.graphs, helper.graphs._regions
    (memory,) = memories(graphs)
    before, backward = memory.nbytes, RegionBody.backward

    def fails(body):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("made to fail")
        return backward(body)

    (small,) = region.buckets
    larger = Bucket(2048, (small.limits[0], 2048))
    with monkeypatch.context() as patch:
        patch.setattr(RegionBody, "backward", fails)
        with pytest.raises(CaptureError, match="made to fail"):
            region.add(larger, record=True)
    region.drop(larger)
    assert memory.nbytes == before
    spoil(graphs)
    check(graphs, [(1, 16, 20)])
    region.add(larger, record=True)
    check(graphs, [(1, 40, 44)])
    check(graphs, [(1, 16, 20)])
    assert graphs.statistics().replays == 3


def test_what_lives_on_after_a_capture_is_refused(graphs_of, monkeypatch):
    kept, settle = [], ArenaPool.settle

    def keeps(pool):
        with pool.taking(), torch.cuda.use_mem_pool(pool._pool):
            kept.append(torch.zeros(3, MB, device="cuda"))
        return settle(pool)

    monkeypatch.setattr(ArenaPool, "settle", keeps)
    with pytest.raises(CaptureError, match=r"made a tensor \[3, 1048576\] of torch.float32, which is kept"):
        graphs_of(buckets=(512,), strict=True)
    kept.clear()
