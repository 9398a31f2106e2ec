"""A memory limit that buckets on demand keep to, and what is dropped where it is reached."""

import logging
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.planning.demand import Demand
from bridge_cg_plugin.graphs.planning.room import MemoryLimit
from bridge_cg_plugin.graphs.recordings.late_recordings import LateRecordings
from bridge_cg_plugin.graphs.reports.report import GIB

from ..executors import new_executor
from ..ranks import run_ranks
from .growing import LARGE, OTHER, SMALL, Pools, assert_equals_eager, capacities, grown
from .mixes import MODULES
from .test_demand import plain_menu
from .towers import new_tower

UNUSED = 4
# Smaller microbatches do not pad into the bucket of `OTHER`.
EXACT = {"exact_below": 150}


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def limit(graphs, bytes_per_slot=None, unused_steps=None):
    graphs._growing._room._limit = MemoryLimit(bytes_per_slot, unused_steps)


def slot_bytes(graphs):
    return sum(region.slot_bytes(settled=False) for region in graphs._regions)


def steps(tower, graphs, *microbatches, count=1):
    for seed in range(count):
        with graphs.step():
            for rows in microbatches:
                assert_equals_eager(tower, graphs, rows, seed)


@pytest.mark.parametrize("modules", MODULES)
def test_a_bucket_that_takes_more_than_the_limit_is_left_out(tower, modules, caplog):
    graphs, stack = grown(tower, SMALL, modules=modules)
    with stack, caplog.at_level(logging.WARNING):
        before = slot_bytes(graphs)
        limit(graphs, before * 1.5)
        steps(tower, graphs, SMALL, LARGE, count=4)
        assert capacities(graphs) == [64] and slot_bytes(graphs) == before
        assert sum("does not fit the memory limit" in record.message for record in caplog.records) == 1
        replays = graphs.statistics().replays
        steps(tower, graphs, SMALL, LARGE)
        assert graphs.statistics().replays == replays + len(graphs._regions)


def test_the_option_is_the_limit(tower):
    graphs, stack = grown(tower, SMALL)
    with stack:
        small = slot_bytes(graphs)
    for factor, found in ((1.5, [64]), (100, [64, 384])):
        graphs, stack = grown(tower, SMALL, buckets_max_gb=factor * small / GIB)
        with stack:
            steps(tower, graphs, LARGE, count=2)
            assert capacities(graphs) == found


def test_smaller_recordings_move_at_once_where_they_would_not_fit_beside_the_largest(tower):
    graphs, stack = grown(tower, SMALL, executor=Pools(new_executor()).executor)
    with stack:
        (region,) = graphs._regions
        steps(tower, graphs, LARGE)
        small = max(region.sources.current.recordings.values(), key=lambda recorded: recorded.nbytes)
        small.nbytes = slot_bytes(graphs) * 100  # of its pool
        limit(graphs, 50 * slot_bytes(graphs) / 100)
        steps(tower, graphs, SMALL, LARGE)
        steps(tower, graphs, SMALL, LARGE, count=2)
        assert capacities(graphs) == [64, 384]
        assert {made.pool for made in region.sources.current.recordings.values()} == {region._slots[0].pool}
        assert len(region.sources.current.recordings) == 2
        # The large one was missed once; it takes the small microbatch until that has its recording again.
        assert graphs.statistics().fallbacks == {"not_captured_yet": 1}


@pytest.mark.parametrize("modules", MODULES)
def test_a_bucket_that_was_not_used_for_long_is_dropped_for_one_that_is_wanted(tower, modules):
    graphs, stack = grown(tower, OTHER, modules=modules, **EXACT)  # the largest stays
    with stack:
        steps(tower, graphs, OTHER, SMALL, count=3)
        assert capacities(graphs) == [64, 192]
        # Until then everything is used.
        graphs._growing.demand._lately.seen.clear()
        steps(tower, graphs, OTHER, count=UNUSED)
        graphs._growing.demand._lately.seen.clear()
        limit(graphs, slot_bytes(graphs) * 0.999, UNUSED)
        steps(tower, graphs, [[1, 8, 16]], count=2)
        assert 64 not in capacities(graphs) and 192 in capacities(graphs)


def test_what_was_used_lately_is_not_dropped(tower):
    graphs, stack = grown(tower, OTHER, **EXACT)
    with stack:
        steps(tower, graphs, OTHER, SMALL, count=3)
        limit(graphs, slot_bytes(graphs), UNUSED)
        steps(tower, graphs, OTHER, SMALL, LARGE, count=3)
        assert capacities(graphs) == [64, 192]


def test_a_bucket_without_memory_is_tried_again_once_others_made_room(tower, monkeypatch, caplog):
    graphs, stack = grown(tower, OTHER, strict=True, **EXACT)
    record, failed = LateRecordings.record, []

    def fail_once(late, *args):
        if not failed:
            failed.append(args)
            raise torch.OutOfMemoryError("made to fail")
        return record(late, *args)

    with stack, caplog.at_level(logging.WARNING):
        steps(tower, graphs, OTHER, SMALL, count=3)
        steps(tower, graphs, OTHER, count=UNUSED + 1)
        limit(graphs, None, UNUSED)
        graphs._growing.demand._lately.seen.clear()
        monkeypatch.setattr(LateRecordings, "record", fail_once)
        steps(tower, graphs, LARGE, count=3)
        assert failed and capacities(graphs) == [192, 384]
        assert not [record for record in caplog.records if "could not be captured" in record.message]
        steps(tower, graphs, SMALL, count=2)
        assert 64 in capacities(graphs)


@given(
    st.dictionaries(st.integers(1, 9).map(Bucket), st.integers(0, 100), min_size=1),
    st.integers(0, 100),
)
def test_the_victim_is_what_was_not_used_for_longest_but_never_the_largest(used, before):
    demand = Demand(plain_menu())
    demand.buckets = list(used)
    random.Random(before).shuffle(demand.buckets)
    victim = demand.victim(used, before)
    others = {bucket: step for bucket, step in used.items() if bucket != max(used)}
    if victim is None:
        assert all(step >= before for step in others.values())
    else:
        assert others[victim] == min(others.values()) < before


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
