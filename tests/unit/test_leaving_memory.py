"""Graphs whose memory leaves the device between steps: they compute what eager does when it is back."""

import pytest
import torch

from ..leaving import LeavingExecutor
from .changes import GraphedAndEager
from .towers import forward, graphs_on, new_tower

ROWS = ([[1, 4, 4]], [[1, 8, 8], [1, 4, 4]])


@pytest.fixture
def executor():
    return LeavingExecutor()


def test_nothing_leaves_between_a_forward_and_its_backward_or_in_a_step(executor, caplog):
    model = new_tower()
    with graphs_on(model, executor=executor, slots=2, buckets=(16,)) as graphs:
        hidden = forward(model, ROWS[0])[0]
        for _ in range(2):
            assert graphs.release_memory() == 0 and not executor.memory_away
        hidden.sum().backward()
        with graphs.step():
            assert graphs.release_memory() == 0
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1 and "between its forward and its backward" in warnings[0]
        assert graphs.release_memory() == 100


@pytest.mark.parametrize("parts", [False, True])
def test_without_room_microbatches_run_eager_and_each_step_tries_once(parts, caplog):
    pair = GraphedAndEager(0, parts=parts)
    executor = pair.graphs.executor
    pair.microbatch()
    pair.graphs.release_memory()
    executor.room = False
    before = pair.graphs.statistics().replays
    for _ in range(2):
        with pair.graphs.step():
            for _ in range(3):
                pair.random.seed(1)
                pair.microbatch()
    found = pair.graphs.statistics()
    assert executor.tries == 2 and found.replays == before and found.fallbacks["memory_released"] == 6
    assert len([r for r in caplog.records if "memory cannot return" in r.getMessage()]) == 1
    executor.room = True
    with pair.graphs.step():
        pair.microbatch()
    assert pair.graphs.statistics().replays > before and executor.returned == 1


def test_graphs_are_dropped_while_their_memory_is_away(executor):
    model = new_tower()
    with graphs_on(model, executor=executor, buckets=(16,)) as graphs:
        graphs.release_memory()
        graphs.detach()
        assert executor.memory_away
    assert torch.equal(forward(model, ROWS[0])[0], forward(new_tower(), ROWS[0])[0])
