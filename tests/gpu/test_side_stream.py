"""Recordings on two streams: the same arithmetic as on one, beside one another, whatever else the GPU does."""

import functools

import pytest
import torch

from scripts.performance import measure

from .common import poison, vision_graphs
from .conftest import LAYERS
from .test_parity import run

ONE, FOUR = [(1, 28, 28)], [(1, 16, 16), (1, 12, 20), (1, 8, 6), (1, 6, 4)]
REPLAYS = 4
MOVED = {"offload": ("attention", "mlp"), "recompute": ("layernorm",)}


@pytest.fixture
def repeatable(monkeypatch):
    """Let attention's backward repeat itself to the bit; modules look when they are built."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def repeatable_model(repeatable, tower_module):
    made = tower_module.build_tower(layers=LAYERS)
    yield made
    made.__dict__.pop("forward", None)


@functools.cache
def other_stream():
    """Return one for all tests: cuBLAS keeps 32 MiB for every stream that has multiplied."""
    return torch.cuda.Stream()


def disturbed(replay):
    """Replay while products on another stream take a part of the GPU, so that streams meet at other places."""
    a = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(other_stream()):
        for _ in range(20):
            a @ a
    found = replay()
    torch.cuda.synchronize()
    return found


@pytest.mark.first
@pytest.mark.parametrize(("kernels", "grid"), [("exact", FOUR), ("fast", ONE)], ids=["exact", "fast"])
def test_two_streams_equal_one_to_the_bit(tower_module, repeatable_model, kernels, grid):
    grads = tower_module.MainGrads(repeatable_model)
    batch, other = (tower_module.make_batch(grid, repeatable_model, seed=seed) for seed in (1, 2))
    results = {}
    for streams in (1, 2):
        helper = vision_graphs(repeatable_model, buckets=(1024,), streams=streams, kernels=kernels)
        try:
            found = [run(tower_module, repeatable_model, grads, batch) for _ in range(2)]
            for _ in range(REPLAYS):
                tower_module.step(repeatable_model, other)  # what is read too early is of another batch
                poison(helper.graphs)
                found.append(disturbed(lambda: run(tower_module, repeatable_model, grads, batch)))
            assert not helper.graphs.statistics().fallbacks
        finally:
            helper.delete_cuda_graphs()
        results[streams] = [[*(o.detach().clone() for o in outputs), *gradients] for outputs, gradients in found]
    for streams, found in results.items():
        for place, tensors in enumerate(found):
            pairs = zip(tensors, results[1][0], strict=True)
            differ = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
            assert not differ, f"replay {place} on {streams} streams: outputs and gradients {differ} differ"


def test_activations_leave_the_device_beside_side_stream(tower_module, repeatable_model):
    grads = tower_module.MainGrads(repeatable_model)
    batch = tower_module.make_batch(ONE, repeatable_model)
    found = {}
    for streams in (1, 2):
        helper = vision_graphs(repeatable_model, buckets=(1024,), streams=streams, kernels="fast", **MOVED)
        try:
            for _ in range(3):
                outputs, gradients = disturbed(lambda: run(tower_module, repeatable_model, grads, batch))
            found[streams] = [*(o.detach().clone() for o in outputs), *gradients]
        finally:
            helper.delete_cuda_graphs()
    assert all(map(torch.equal, found[1], found[2]))


def test_kernels_run_beside_one_another(tower_module, model, grads, graphs_of):
    batch = tower_module.make_batch(ONE, model)
    graphs_of(buckets=(784,), kernels="fast", streams=2)
    for _ in range(3):
        tower_module.step(model, batch)
    kernels = measure.profile(lambda: tower_module.step(model, batch))
    together = sum(ms for ms, _ in kernels.by_name.values())
    assert together > 1.03 * kernels.busy_ms, f"{together:.2f} ms of kernels in {kernels.busy_ms:.2f} ms"


def test_a_capture_that_fails_beside_side_work_leaves_the_next_one_possible(
    tower_module, model, grads, graphs_of, monkeypatch
):
    from bridge_cg_plugin.graphs.recordings.streams import SideStream

    wait = SideStream._wait_for_previous_group

    def fails(side):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("made to fail")
        wait(side)

    helper = graphs_of(buckets=(1024,), streams=2, strict=False, capture=False)
    monkeypatch.setattr(SideStream, "_wait_for_previous_group", fails)
    helper.create_cudagraphs()
    assert not helper.graphs.captured and "made to fail" in helper.graphs.failure
    monkeypatch.setattr(SideStream, "_wait_for_previous_group", wait)
    batch = tower_module.make_batch(ONE, model)
    expected, first = run(tower_module, model, grads, batch)
    helper.create_cudagraphs()
    outputs, replayed = run(tower_module, model, grads, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert tower_module.largest_relative(replayed, first) <= 3e-2
    assert helper.graphs.statistics().replays == 1
