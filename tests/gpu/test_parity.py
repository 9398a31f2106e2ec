"""Replays equal eager: outputs to the bit, gradients within what eager differs from itself.

Kernels that round a gradient otherwise than eager's are measured against fp32 instead: test_precision.py.
"""

import pytest
import torch

from .lora import add_lora

MIXES = {
    "one image": [(1, 28, 28)],
    "exactly a bucket": [(1, 32, 32)],
    "one unit over a bucket": [(1, 32, 32), (1, 2, 2)],
    "four images": [(1, 20, 20)] * 4,
    "video": [(8, 12, 12)],
    "video and images": [(4, 10, 14), (1, 28, 20), (1, 6, 4)],
    "many tiny": [(1, 4, 6)] * 30,
    "most frames": [(1, 4, 8)] * 48,
}
BUCKETS = (768, 1024, 1536, 2048)
NOISE_FLOOR = 2e-3


def run(tower_module, model, grads, batch):
    grads.zero()
    outputs = tower_module.step(model, batch)
    return outputs, grads.copy()


def poison(graphs) -> None:
    """Fill every static floating-point buffer with NaN, as memory nobody wrote may be."""
    for region in graphs._regions:
        for slot in region._slots:
            for flat in slot.static.storages:
                if flat.is_floating_point():
                    flat.fill_(torch.nan)


def check_grid(tower_module, model, grads, helper, grid, seed, name) -> None:
    """Compare a microbatch under the graphs, replayed or not, with eager."""
    batch = tower_module.make_batch(grid, model, seed=seed)
    with helper.graphs.paused():
        expected, first = run(tower_module, model, grads, batch)
        _, second = run(tower_module, model, grads, batch)
    poison(helper.graphs)
    outputs, found = run(tower_module, model, grads, batch)
    noise = tower_module.largest_relative(second, first)
    assert tower_module.largest_relative(outputs, expected) == 0.0, name
    assert tower_module.largest_relative(found, first) <= max(1.5 * noise, NOISE_FLOOR), name


def check_mixes(tower_module, model, grads, helper) -> None:
    """Replay every mix and compare it with eager."""
    for name, grid in MIXES.items():
        check_grid(tower_module, model, grads, helper, grid, len(name), name)
    assert not helper.graphs.statistics().fallbacks


@pytest.mark.first
def test_mixes_replayed_from_one_capture(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=BUCKETS, max_frames=48, kernels="exact")
    check_mixes(tower_module, model, grads, helper)


@pytest.mark.first
def test_replayed_step_reads_nothing_on_the_host(tower_module, model, grads, graphs_of):
    graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(2, 12, 16), (1, 20, 20)], model)
    tower_module.step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower_module.step(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_microbatches_in_flight(tower_module, model, grads, graphs_of):
    batches = [tower_module.make_batch(grid, model, seed=i) for i, grid in enumerate(([(1, 28, 28)], [(2, 16, 20)]))]
    grads.zero()
    for batch in batches:
        tower_module.step(model, batch)
    expected = grads.copy()
    helper = graphs_of(buckets=(1024,), slots=2)
    grads.zero()
    outputs = [tower_module.forward(model, batch) for batch in batches]
    assert helper.graphs._regions[0].free_slots() == 0
    for made, batch in zip(outputs, batches, strict=True):
        torch.autograd.backward(made, batch.gradients)
    assert helper.graphs._regions[0].free_slots() == 2
    assert tower_module.largest_relative(grads.copy(), expected) <= 3e-2


def test_backward_on_another_stream_than_the_last_use(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    with helper.graphs.paused():
        expected, _ = run(tower_module, model, grads, batch)
    side = torch.cuda.Stream()
    for _ in range(3):
        outputs = tower_module.step(model, batch)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            elsewhere = tower_module.step(model, batch)
        torch.cuda.current_stream().wait_stream(side)
        for made in (outputs, elsewhere):
            assert tower_module.largest_relative(made, expected) == 0.0


@pytest.mark.first
def test_evaluation_runs_forward_only_graphs(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 20, 24), (2, 8, 8)], model)
    model.eval()
    with torch.no_grad():
        with helper.graphs.paused():
            expected = tower_module.forward(model, batch)
        outputs = tower_module.forward(model, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert sum(c.evaluations for c in helper.graphs.statistics().buckets.values()) == 1


def test_gradients_that_are_nan_leave_no_trace(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    with helper.graphs.paused():
        _, expected = run(tower_module, model, grads, batch)
    torch.autograd.backward(
        tower_module.forward(model, batch), [torch.full_like(g, torch.nan) for g in batch.gradients]
    )
    assert any(g.isnan().any() for g in grads.copy())
    _, replayed = run(tower_module, model, grads, batch)
    assert tower_module.largest_relative(replayed, expected) <= 3e-2


@pytest.mark.parametrize(
    "trained",
    ["", pytest.param("merger", marks=pytest.mark.first), "layers.1.mlp"],
    ids=["nothing", "mergers", "one mlp"],
)
def test_frozen_parts(tower_module, model, graphs_of, trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = bool(trained) and trained in name
    grads = tower_module.MainGrads(model)
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    with helper.graphs.paused():
        expected = [o.detach() for o in tower_module.forward(model, batch)]
    outputs = tower_module.forward(model, batch)
    assert tower_module.largest_relative([o.detach() for o in outputs], expected) == 0.0
    if trained:
        with helper.graphs.paused():
            _, eager = run(tower_module, model, grads, batch)
        _, replayed = run(tower_module, model, grads, batch)
        assert tower_module.largest_relative(replayed, eager) <= 3e-2
    assert helper.graphs.statistics().replays >= 1


@pytest.mark.first
def test_lora_on_the_encoder(tower_module, model, graphs_of):
    add_lora(model, ["linear_qkv", "linear_fc1"])
    grads = tower_module.MainGrads(model)
    assert 0 < len(grads.parameters) < len(list(model.parameters()))
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    with helper.graphs.paused():
        expected, first = run(tower_module, model, grads, batch)
    outputs, replayed = run(tower_module, model, grads, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert tower_module.largest_relative(replayed, first) <= 3e-2


def test_lora_dropout_draws_anew_in_every_replay_and_not_in_evaluation(tower_module, model, graphs_of):
    add_lora(model, ["linear_qkv"], dropout=0.5)
    tower_module.MainGrads(model)
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    first, second = tower_module.step(model, batch), tower_module.step(model, batch)
    assert tower_module.largest_relative(first, second) > 1e-3
    model.eval()
    with torch.no_grad():
        replayed = tower_module.forward(model, batch)
        with helper.graphs.paused():
            expected = tower_module.forward(model, batch)
    assert tower_module.largest_relative(replayed, expected) == 0.0
    assert helper.graphs.statistics().replays == 3
