"""A memory limit that buckets on demand keep to."""

import logging

import pytest

from bridge_cg_plugin.graphs.memory.pools import PlainMemory
from bridge_cg_plugin.graphs.reports.report import GIB

from ..executors import new_executor
from ..ranks import run_ranks
from .growing import LARGE, OTHER, SMALL, assert_equals_eager, capacities, grown
from .towers import new_tower


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def limit(graphs, bytes_per_slot):
    graphs._growing._limit = bytes_per_slot


def slot_bytes(graphs):
    return sum(region.slot_bytes() for region in graphs._regions)


def steps(tower, graphs, *microbatches, count=1):
    for seed in range(count):
        with graphs.step():
            for rows in microbatches:
                assert_equals_eager(tower, graphs, rows, seed)


def test_a_bucket_that_takes_more_than_the_limit_is_left_out(tower, caplog):
    graphs, stack = grown(tower, SMALL)
    with stack:
        before = slot_bytes(graphs)
    graphs, stack = grown(tower, SMALL, buckets_max_gb=1.5 * before / GIB)
    with stack, caplog.at_level(logging.WARNING):
        steps(tower, graphs, SMALL, LARGE, count=4)
        assert capacities(graphs) == [64] and slot_bytes(graphs) == before
        assert sum("does not fit the memory limit" in record.message for record in caplog.records) == 1
        replays = graphs.statistics().replays
        steps(tower, graphs, SMALL, LARGE)
        assert graphs.statistics().replays == replays + len(graphs._regions)


def grow_where_one_rank_has_less_memory():
    from torch import distributed

    from .growing import ON_DEMAND
    from .towers import DEFAULTS, VisionGraphOptions, VisionTECudaGraphHelper, forward

    model = new_tower()
    helper = VisionTECudaGraphHelper(
        model, model.config, options=VisionGraphOptions(**{**DEFAULTS, **ON_DEMAND, "strict": False})
    )
    forward(model, SMALL)
    helper.create_cudagraphs()
    graphs, found = helper.graphs, []
    limit(graphs, slot_bytes(graphs) * (1.5 if distributed.get_rank() else 100))
    for seed, rows in enumerate((SMALL, LARGE, LARGE, OTHER, LARGE, SMALL)):
        with graphs.step():
            found.append([o.detach() for o in forward(model, rows, seed)])
    return capacities(graphs), dict(graphs.statistics().fallbacks)


@pytest.mark.reference_executor
def test_ranks_that_share_layers_drop_alike(tmp_path):
    first, second = run_ranks(2, grow_where_one_rank_has_less_memory, tmp_path, tensor_model_parallel_size=2)
    assert first == second
    assert first[0] == [64] or max(first[0]) < 384


class Plain(PlainMemory):
    """Memory as a pool of PyTorch's: what one recording had stays while another one is left."""

    nbytes = 0

    def __init__(self): ...

    def settle(self):
        self.nbytes += 2**20
        return self.nbytes

    def keep(self, nbytes):
        self.nbytes = self.nbytes if nbytes else 0


def test_where_memory_stays_with_others_no_more_than_one_bucket_is_dropped(tower, monkeypatch):
    executor = new_executor()
    monkeypatch.setattr(executor, "new_memory", Plain)
    graphs, stack = grown(tower, SMALL, executor=executor)
    with stack:
        limit(graphs, slot_bytes(graphs) + 2**19)
        steps(tower, graphs, SMALL, LARGE, count=4)
        assert capacities(graphs) == [64]
