"""Buckets that appear while training runs, on real graphs: each replay equals eager to the bit, a failure harms nothing."""

import pytest
import torch

from .test_parity import MIXES, NOISE_FLOOR, poison, run

WARM, LARGE = [(1, 28, 28)], [(1, 64, 64)] * 4
MOST_ROUNDS = 12


def compared(tower_module, model, grads, helper, grid, seed) -> None:
    """Compare a microbatch, replayed or eager, with eager."""
    batch = tower_module.make_batch(grid, model, seed)
    with helper.graphs.paused():
        expected, first = run(tower_module, model, grads, batch)
        _, second = run(tower_module, model, grads, batch)
    poison(helper.graphs)
    outputs, found = run(tower_module, model, grads, batch)
    noise = tower_module.largest_relative(second, first)
    assert tower_module.largest_relative(outputs, expected) == 0.0, grid
    assert tower_module.largest_relative(found, first) <= max(1.5 * noise, NOISE_FLOOR), grid


@pytest.mark.first
@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["whole", "attn"])
def test_mixes_replayed_from_buckets_that_appear(tower_module, model, grads, graphs_of, modules):
    helper = graphs_of(capture=False, modules=modules, max_frames=48, kernels="exact")
    tower_module.step(model, tower_module.make_batch(WARM, model))
    helper.create_cudagraphs()
    regions, replayed = len(helper.graphs._regions), 0
    for rounds in range(MOST_ROUNDS):
        before = helper.graphs.statistics().replays
        for name, grid in MIXES.items():
            with helper.graphs.step():
                compared(tower_module, model, grads, helper, grid, len(name) + rounds)
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
        compared(tower_module, model, grads, helper, LARGE, 0)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - 2**27, dtype=torch.uint8, device="cuda")  # eager keeps what PyTorch's cache holds
    with helper.graphs.step():
        compared(tower_module, model, grads, helper, WARM, 1)
    del taken
    said = [record.message for record in caplog.records if "could not be captured" in record.message]
    assert len(said) == 1, caplog.messages
    before = helper.graphs.statistics().replays
    for seed in range(3):
        with helper.graphs.step():
            compared(tower_module, model, grads, helper, WARM, seed)
            compared(tower_module, model, grads, helper, LARGE, seed)
    assert helper.graphs.statistics().replays == before + 3
    assert helper.graphs.statistics().fallbacks["not_captured_yet"] >= 1
