"""Parts of layers whose graphs share memory: what overwrites it comes in order, also across streams and failures."""

import gc

import pytest
import torch

from bridge_cg_plugin.graphs.errors import ReplayError
from bridge_cg_plugin.graphs.recordings.recording import RegionBody

from .conftest import LAYERS

GRIDS = [[(1, 32, 32), (1, 28, 28)], [(1, 36, 36)]]
LEAVES = {"offload": ("attention", "mlp", "layernorm", "other"), "recompute": ("layernorm",)}
SETTINGS = {"buckets": (1344, 1856), "max_frames": 2, "evaluation": False, "offload_min_bytes": 65536, **LEAVES}
MODULES = pytest.mark.parametrize("modules", [("attn",), ("mlp",)], ids=",".join)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def results(tower_module, model, grads, batch):
    grads.zero()
    return [*tower_module.step(model, batch), *grads.copy()]


@MODULES
def test_microbatches_on_two_streams(tower_module, graphs_of, model, grads, modules):
    """The one slot's memory passes from stream to stream, each of which is late."""
    batches = [tower_module.make_batch(grid, model, seed=seed) for seed, grid in enumerate(GRIDS)]
    helper = graphs_of(slots=1, modules=modules, **SETTINGS)
    expected = [tower_module.step(model, batch) for batch in batches]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            torch.cuda._sleep(20_000_000)
            found.append(tower_module.step(model, batches[turn // 2 % 2]))
    torch.cuda.synchronize()
    assert not helper.graphs.statistics().fallbacks
    for turn, outputs in enumerate(found):
        assert all(map(torch.equal, outputs, expected[turn // 2 % 2])), turn


@MODULES
def test_a_backward_behind_that_of_an_earlier_part_fails(tower_module, graphs_of, model, grads, modules):
    indexes = model.decoder.deepstack_visual_indexes
    layer = model.decoder.layers[indexes[0] + 1]
    run = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: run(hidden_states.detach(), *args, **kwargs)
    batch = tower_module.make_batch(GRIDS[0], model)

    def gradients(places):
        grads.zero()
        outputs = tower_module.forward(model, batch)
        for place in places:
            torch.autograd.backward(outputs[place], batch.gradients[place])
        return grads.copy()

    graphs_of(slots=1, modules=modules, **SETTINGS)
    right = gradients([0, 1])
    with pytest.raises(ReplayError, match="came after that of an earlier layer"):
        gradients([1, 0])
    assert all(map(torch.equal, gradients([0, 1]), right))


@MODULES
@pytest.mark.parametrize("at", [2, LAYERS + 1], ids=["forward", "backward"])
def test_a_capture_that_fails_half_way_keeps_nothing(tower_module, graphs_of, model, grads, monkeypatch, modules, at):
    batch = tower_module.make_batch(GRIDS[0], model)
    tower_module.step(model, batch)
    helper = graphs_of(capture=False, strict=False, slots=1, modules=modules, **SETTINGS)
    captured = 0

    def failing(original):
        def run(body):
            nonlocal captured
            captured += torch.cuda.is_current_stream_capturing()
            if captured == at:
                raise torch.OutOfMemoryError("planned")
            return original(body)

        return run

    taken = []
    for _ in range(3):  # the first takes workspaces, which stay
        captured = 0
        with monkeypatch.context() as patch:
            for name in ("forward", "backward"):
                patch.setattr(RegionBody, name, failing(getattr(RegionBody, name)))
            helper.create_cudagraphs()
        assert not helper.graphs_created() and captured == at
        gc.collect()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    assert taken[2] <= taken[1]
    eager = results(tower_module, model, grads, batch)
    torch.randn(4, device="cuda")
    helper.create_cudagraphs()
    found = results(tower_module, model, grads, batch)
    assert helper.graphs.statistics().replays == LAYERS
    outputs = len(batch.gradients)
    assert max(map(tower_module.relative, found[:outputs], eager[:outputs])) < 2e-2
    assert max(map(tower_module.relative, found[outputs:], eager[outputs:])) < 5e-2
