"""Deepstack mergers on a side stream."""

import pytest

from bridge_cg_plugin.graphs.recordings.side_stream import SideStream
from bridge_cg_plugin.upstream.encoders.qwen3_vl import side_mergers
from tests.unit.towers import assert_close, draw, graphs_on, new_tower, results


def mergers_of(tower):
    return list(tower.decoder.deepstack_merger_list)


def test_mergers_use_the_side_stream_while_work_with_a_side_stream_is_recorded():
    tower = new_tower()
    before = [dict(vars(merger)) for merger in mergers_of(tower)]
    side = SideStream(None)
    side.begin()
    with side.active(), side_mergers([tower]):
        assert all("forward" in vars(merger) for merger in mergers_of(tower))
        _, deepstack = tower(*draw([[1, 4, 6]]))
    assert [output.end for output in side._outputs] == deepstack
    assert [dict(vars(merger)) for merger in mergers_of(tower)] == before


def test_without_a_side_stream_mergers_stay_upstreams():
    tower = new_tower()
    with side_mergers([tower]):
        assert not any("forward" in vars(merger) for merger in mergers_of(tower))


def test_mergers_that_reduce_over_ranks_stay_on_the_main_stream():
    tower = new_tower()
    side = SideStream(None)
    mergers_of(tower)[0].config.tensor_model_parallel_size = 2
    with side.active(), side_mergers([tower]):
        assert not any("forward" in vars(merger) for merger in mergers_of(tower))


@pytest.mark.parametrize("trained", ["merger", "deepstack_merger_list", "decoder.layers.0", "pos_embed"])
def test_a_tower_of_which_a_part_is_trained(trained):
    tower = new_tower()
    for name, parameter in tower.named_parameters():
        parameter.requires_grad = trained in name
    rows = [[1, 4, 6], [1, 2, 4]]
    outputs, gradients = results(tower, rows)
    with graphs_on(tower, streams=2):
        found, replayed = results(tower, rows)
    assert_close(found, outputs)
    assert_close(replayed, gradients)
