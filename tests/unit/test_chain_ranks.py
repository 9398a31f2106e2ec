"""Parts that share a slot's memory on ranks that share layers: what happens to one rank leaves all on graphs alike."""

from contextlib import contextmanager

import pytest
import torch

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..regions import Counted, new_region
from .packed_parts import APART, CHAIN, LARGE, SMALL, losses, new_model, on_parts, results
from .test_gradients import region_loss
from .towers import move
from .toy import Toy, ToyProgram, toy_batch

CHAINED = pytest.mark.parametrize("offload", [CHAIN, APART], ids=["chain", "apart"])


@contextmanager
def on_a_rank(model, offload, consensus, **options):
    """Put graphs of attention on a model, as on one of several ranks."""
    with on_parts(model, offload=offload, capture=False, executor=ReferenceExecutor(), **options) as graphs:
        graphs.bucket_consensus = consensus
        graphs.capture()
        yield graphs


def agreements(offload, rows, freezes, thaws, moves, layer, **options):
    """Return for each microbatch how often its rank asked others and what ran eager until then.

    Args:
        offload: What leaves the device; None makes no chain.
        rows: Of each microbatch.
        freezes, thaws: The microbatches before which the last layer is frozen, and is not any more.
        moves: The microbatch before which a layer's memory moves; None leaves it.
        layer: The layer's number.
        options: Of the graphs.
    """
    model, consensus, found = new_model(), Counted(), []
    with on_a_rank(model, offload, consensus, **options) as graphs:
        for number, each in enumerate(rows):
            if number in (freezes, thaws):
                model.decoder.layers[2].requires_grad_(number == thaws)
            if number == moves:
                move(model.decoder.layers[layer])
            before = consensus.times
            results(model, each)
            found.append((consensus.times - before, dict(graphs.statistics().fallbacks)))
        return found


@pytest.mark.parametrize("offload, layer, thaws", [(CHAIN, 0, 3), (APART, 2, 5)], ids=["chain", "apart"])
def test_ranks_ask_each_other_alike_where_one_of_them_moved(offload, layer, thaws):
    right = agreements(offload, [SMALL] * 7, 2, thaws, None, layer, buckets=[320])
    for moves in (1, thaws):
        assert agreements(offload, [SMALL] * 7, 2, thaws, moves, layer, buckets=[320]) == right


@pytest.mark.parametrize("offload, moves", [(CHAIN, 2), (CHAIN, 6), (APART, 4)])
def test_a_rank_whose_memory_moved_records_no_more_than_others_have(offload, moves):
    """The last layer has been frozen; only its small bucket was recorded since."""
    rows = [LARGE, SMALL, SMALL, SMALL, LARGE, LARGE, LARGE]
    right = agreements(offload, rows, 1, None, None, 0)
    assert agreements(offload, rows, 1, None, moves, 0) == right


def test_a_rank_whose_memory_moved_uses_the_slot_in_which_others_replay():
    """The second slot alone has the small bucket's recording of this state, and the first is free."""

    def asked(moves):
        model, consensus = Toy(), Counted()
        buckets = [Bucket(4), Bucket(8)]
        region = new_region(ToyProgram(model), ReferenceExecutor(), buckets, slots=2, consensus=consensus)
        region.capture()
        model.mix.requires_grad_(False)
        for _ in range(3):
            region_loss(region, toy_batch((4, 4))).backward()
        (region_loss(region, toy_batch((4, 4))) + region_loss(region, toy_batch((3,)))).backward()
        model.zero_grad()
        if moves:
            move(model)
        before = consensus.times
        region_loss(region, toy_batch((3,))).backward()
        assert region.statistics.replays == 5
        return consensus.times - before

    assert asked(True) == asked(False) == 0


@CHAINED
def test_what_another_rank_could_not_record_no_rank_replays(offload):
    model = new_model()
    with on_a_rank(model, offload, Counted(), strict=False, slots=1) as graphs:
        results(model, LARGE)
        for region in graphs._regions:
            region._consensus = consensus = Counted(fails=1)
        model.decoder.layers[2].requires_grad_(False)
        for _ in range(6):
            results(model, LARGE)
        assert graphs.statistics().fallbacks == {"parameters_changed": 1, "capture_failed": 5}
        assert consensus.times == 1
        move(model.decoder.layers[2])  # nor does a rank whose memory moved try it
        results(model, LARGE)
        assert consensus.times == 1 and graphs.statistics().fallbacks["capture_failed"] == 6


@CHAINED
def test_a_rank_whose_memory_moved_records_what_failed_in_another_slot_alone(offload, monkeypatch):
    """Graphs of a model in a new state could be recorded in the first of two slots only."""
    model = new_model()
    with on_a_rank(model, offload, Counted(), buckets=[512], slots=2, strict=False) as graphs:
        model.decoder.layers[2].requires_grad_(False)
        for _ in range(2):
            results(model, LARGE)
        with monkeypatch.context() as failing:
            failing.setattr(
                ReferenceExecutor, "record_forward", lambda *unused: (_ for _ in ()).throw(torch.OutOfMemoryError())
            )
            kept = [losses(model, LARGE) for _ in range(2)]
            kept.clear()
        before = graphs.statistics()
        assert before.fallbacks["capture_failed"]
        move(model)
        with graphs.step():
            results(model, LARGE)
        after = graphs.statistics()
        assert after.replays > before.replays and after.fallbacks == before.fallbacks


@CHAINED
def test_a_rank_whose_memory_moved_replays_whatever_comes_next(offload):
    """Others replay it, so a bucket that nobody asked for last must not run eager here."""
    for rows in ([LARGE, SMALL, LARGE], [SMALL, LARGE, SMALL]):
        assert agreements(offload, rows, None, None, 1, 0) == [(0, {})] * 3
