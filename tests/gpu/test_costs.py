"""Eager or replay, by times that device events measured."""

import pytest
import torch

from bridge_cg_plugin.vision.eager_costs import TIMED_REPLAYS

pytestmark = pytest.mark.alone


@pytest.mark.first
def test_a_small_image_in_a_huge_bucket_runs_eager(tower_module, model, grads, graphs_of):
    """784 tokens through four layers take eager some 15 ms, a replay of 32,768 tokens several times that."""
    helper = graphs_of(capture=False, buckets=(32768,), max_frames=1)
    batch = tower_module.make_batch([(1, 28, 28)], model)
    for _ in range(10):  # the first ones of a process load libraries, for seconds on a cold host
        tower_module.step(model, batch)
    torch.cuda.synchronize()
    helper.create_cudagraphs()
    with helper.graphs.paused():
        expected = tower_module.step(model, batch)
    for _ in range(TIMED_REPLAYS + 3):
        outputs = tower_module.step(model, batch)
        torch.cuda.synchronize()
        assert tower_module.largest_relative(outputs, expected) == 0.0
    statistics = helper.graphs.statistics()
    assert (statistics.replays, statistics.fallbacks) == (TIMED_REPLAYS, {"eager_is_faster": 3})


def test_a_bucket_of_the_images_size_is_replayed(tower_module, model, grads, graphs_of):
    helper = graphs_of(capture=False, buckets=(784,), max_frames=1)
    batch = tower_module.make_batch([(1, 28, 28)], model)
    for _ in range(3):
        tower_module.step(model, batch)
    torch.cuda.synchronize()
    helper.create_cudagraphs()
    for _ in range(8):
        tower_module.step(model, batch)
        torch.cuda.synchronize()
    statistics = helper.graphs.statistics()
    assert (statistics.replays, statistics.fallbacks) == (8, {})


def test_times_are_taken_without_waiting(tower_module, model, grads, graphs_of):
    """A microbatch begins while the device still works on the ones before; nothing may wait for their events."""
    helper = graphs_of(buckets=(1024,))
    batch = tower_module.make_batch([(1, 28, 28)], model)
    tower_module.step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            tower_module.step(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert helper.graphs.statistics().fallbacks == {}
