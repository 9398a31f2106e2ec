"""Replays equal eager: outputs to the bit, gradients within what eager differs from itself.

Default kernels, which round a gradient otherwise than eager's, are measured against fp32 instead.
"""

import statistics

import pytest
import torch

from tests.models.reference import ALLOWANCE, Fp32Tower, errors_of

from .common import add_lora, host_may_not_wait, poison

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
MOST_ROUNDS = 12  # in which buckets appear for all mixes


def run(tower_module, model, grads, batch):
    grads.zero()
    outputs = tower_module.step(model, batch)
    return outputs, grads.copy()


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


def mean_errors(model, grads, batches, expected):
    """Return the outputs of every batch, and each gradient's error, averaged over the batches."""
    found = [errors_of(model, grads, *pair) for pair in zip(batches, expected, strict=True)]
    errors = [statistics.fmean(values) for values in zip(*(errors for _, _, errors in found), strict=True)]
    return [o for outputs, _, _ in found for o in outputs], errors


def check_nearness(tower_module, model, grads, helper, grids, outputs_near) -> None:
    """Compare replays of each grid, and eager, with fp32.

    Args:
        grids: The batches, three drawn of each.
        outputs_near: Whether replayed outputs are what they should be beside eager's and the exact ones.
    """
    for name, grid in grids.items():
        batches = [tower_module.make_batch(grid, model, seed=seed) for seed in range(3)]
        with helper.graphs.paused():
            tower_module.forward(model, batches[0])  # upstream makes the rotary frequencies in its first call
            reference = Fp32Tower(model)
            expected = [reference.step(batch) for batch in batches]
            eager_outputs, eager = mean_errors(model, grads, batches, expected)
        outputs, errors = mean_errors(model, grads, batches, expected)
        assert outputs_near(outputs, eager_outputs, [o for found, _ in expected for o in found]), name
        for figure in (statistics.median, statistics.fmean):
            print(f"{name}, gradients from fp32: {figure(errors):.2e}, eager's {figure(eager):.2e}")
            assert figure(errors) <= ALLOWANCE * figure(eager), (name, figure.__name__)
    assert not helper.graphs.statistics().fallbacks


def test_gradients_of_default_kernels_are_as_near_to_fp32_as_eagers(tower_module, model, grads, graphs_of):
    helper = graphs_of(buckets=(1024, 1664), max_frames=48)
    grids = {name: MIXES[name] for name in ("one image", "four images", "video and images", "exactly a bucket")}

    def eagers(outputs, expected, exact):
        return tower_module.largest_relative(outputs, expected) == 0.0

    check_nearness(tower_module, model, grads, helper, {**grids, "many tiny": [(1, 4, 6)] * 40}, eagers)


@pytest.mark.first
def test_replayed_step_reads_nothing_on_the_host(tower_module, model, grads, graphs_of):
    graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(2, 12, 16), (1, 20, 20)], model)
    tower_module.step(model, batch)
    with host_may_not_wait():
        tower_module.step(model, batch)


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


@pytest.mark.first
def test_mixes_replayed_from_buckets_that_appear(tower_module, model, grads, graphs_of):
    helper = graphs_of(capture=False, max_frames=48, kernels="exact")
    tower_module.step(model, tower_module.make_batch([(1, 28, 28)], model))
    helper.create_cudagraphs()
    regions, replayed = len(helper.graphs._regions), 0
    for rounds in range(MOST_ROUNDS):
        before = helper.graphs.statistics().replays
        for name, grid in MIXES.items():
            with helper.graphs.step():
                check_grid(tower_module, model, grads, helper, grid, len(name) + rounds, name)
        replayed = (helper.graphs.statistics().replays - before) // regions
        if replayed == len(MIXES):
            break
    assert replayed == len(MIXES), f"{replayed} of {len(MIXES)} mixes are replayed after {MOST_ROUNDS} rounds"
    assert set(helper.graphs.statistics().fallbacks) == {"not_captured_yet"}
