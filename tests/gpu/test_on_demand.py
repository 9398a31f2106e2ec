"""Buckets that appear while training runs, on real graphs: replays equal eager to the bit, a failure harms nothing."""

import pytest
import torch

from .test_parity import MIXES, check_grid

WARM, LARGE = [(1, 28, 28)], [(1, 64, 64)] * 4
MOST_ROUNDS = 12


def small_replays(helper) -> int:
    """Return the replays of buckets that take WARM and little more: memory may allow a large one at any step."""
    return sum(b.replays for bucket, b in helper.graphs.statistics().buckets.items() if bucket.tokens < 1024)


@pytest.mark.first
def test_mixes_replayed_from_buckets_that_appear(tower_module, model, grads, graphs_of):
    helper = graphs_of(capture=False, max_frames=48, kernels="exact")
    tower_module.step(model, tower_module.make_batch(WARM, model))
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


def test_no_memory_for_a_later_bucket_leaves_the_graphs_there_are(tower_module, model, grads, graphs_of, caplog):
    helper = graphs_of(capture=False, strict=False)
    tower_module.step(model, tower_module.make_batch(WARM, model))
    helper.create_cudagraphs()
    with helper.graphs.step():
        check_grid(tower_module, model, grads, helper, LARGE, 0, "large")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    allowed = torch.cuda.memory_reserved() + 3 * 2**30  # enough for the small one eager, not for the large one's 4 GiB
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        with helper.graphs.step():
            assert torch.cuda.memory_allocated() <= before + 2**26
            check_grid(tower_module, model, grads, helper, WARM, 1, "warm")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    said = [record.message for record in caplog.records if "could not be captured" in record.message]
    assert len(said) == 1, caplog.messages
    before = small_replays(helper)
    for seed in range(3):
        with helper.graphs.step():
            check_grid(tower_module, model, grads, helper, WARM, seed, "warm")
            check_grid(tower_module, model, grads, helper, LARGE, seed, "large")
    assert small_replays(helper) == before + 3
    assert helper.graphs.statistics().fallbacks["not_captured_yet"] >= 1
