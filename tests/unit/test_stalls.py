"""A rank that waits for another one: what it says, when it ends, and what does not end it."""

import logging
import time

import pytest
import torch

from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.recording import ToldRecording
from bridge_cg_plugin.upstream.stalls import StallWatch

from .mixes import IMAGES
from .towers import draw, graphs_on, new_tower, results


class Mark:
    def __init__(self):
        self.passed, self.records = True, 0

    def record(self):
        self.records += 1

    def query(self):
        return self.passed


class Rank:
    """A watch with a clock and a device of the test's own, whose thread does not look by itself."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(StallWatch, "_watch", lambda self: None)
        self.now, self.mark, self.ended = 0.0, Mark(), []
        self.watch = StallWatch(self.ended.append, lambda: self.now, lambda: self.mark)

    def look_at(self, now):
        self.now = now
        self.watch.look()


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_a_replay_that_does_not_end_ends_the_rank(rank):
    with rank.watch.during("step 7, with graphs", 60):
        rank.now = 10
        rank.watch.launched("replay of the forward of vision_encoder")
        rank.mark.passed = False
        rank.look_at(69)
        assert not rank.ended
        rank.look_at(71)
    (said,) = rank.ended
    assert "this rank ends in step 7, with graphs: the replay of the forward of vision_encoder has not ended" in said
    assert "60 s" in said


def test_one_that_ended_or_goes_on_being_launched_does_not(rank):
    with rank.watch.during("step 1", 60):
        rank.watch.launched("replay")
        rank.look_at(100)  # ended
        rank.mark.passed = False
        rank.watch.launched("replay")
        rank.look_at(150)
    rank.look_at(500)  # outside a step nothing is known
    assert not rank.ended and rank.mark.records == 2


def test_a_long_step_is_named_once_before_the_time_out(rank, caplog):
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        with rank.watch.during("step 1", 60):
            rank.look_at(29)
            assert not caplog.records
            rank.look_at(31)
            rank.look_at(59)
        with rank.watch.during("step 2", 60):
            rank.look_at(119)
    (record,) = caplog.records
    assert record.getMessage().startswith("[rank 0] this rank has been in step 1 for 31 s")
    assert not rank.ended


def test_what_has_no_time_out_of_its_own_has_that_of_the_last_step(rank, caplog):
    with rank.watch.during("capture"):
        rank.look_at(1e6)
    assert rank.watch._thread is None
    with rank.watch.during("step 3", 60):
        pass
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"), rank.watch.during("capture"):
        rank.look_at(1e6 + 31)
    assert "has been in capture for 31 s" in caplog.text


def test_its_thread_looks_by_itself():
    ended, mark = [], Mark()
    watch = StallWatch(ended.append, mark=lambda: mark)
    with watch.during("step 1", 0.2):
        watch.launched("replay")
        mark.passed = False
        end = time.monotonic() + 10
        while not ended and time.monotonic() < end:
            time.sleep(0.01)
    assert ended


def test_every_replay_tells(monkeypatch):
    told = []
    record = ReferenceExecutor.record
    monkeypatch.setattr(
        ReferenceExecutor,
        "record",
        lambda self, body, pool: ToldRecording(record(self, body, pool), told.append, body.name),
    )
    model = new_tower()
    with graphs_on(model) as graphs:
        results(model, IMAGES)
        assert told == ["replay of the forward of vision_encoder", "replay of the backward of vision_encoder"]
        with torch.no_grad():
            model.eval()(*draw(IMAGES))
        assert len(told) == 3 and graphs.statistics().replays == 2
