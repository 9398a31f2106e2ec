"""What a capture makes a step wait for, and what is counted of it."""

import gc
import time

import pytest

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.region import Region

from .growing import LARGE, SMALL, assert_equals_eager, grown
from .towers import new_tower


@pytest.fixture(scope="module")
def tower():
    return new_tower()


def test_a_step_waits_for_the_recordings_of_all_its_parts(tower, monkeypatch):
    graphs, stack = grown(tower, SMALL)
    add, each = Region.add, 0.05

    def slow(region, *args):
        time.sleep(each)  # before its own clock runs, as what waits for another rank
        add(region, *args)

    monkeypatch.setattr(Region, "add", slow)
    with stack:
        for _ in range(3):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE)
        found, regions = graphs.statistics(), len(graphs._regions)
        assert list(found.pauses) == [2] and found.pauses[2] >= regions * each
        assert found.capture_seconds >= found.pause_seconds == found.longest_pause


def test_no_garbage_is_collected_while_a_step_waits_for_a_capture(tower, monkeypatch):
    collecting = []

    def noted(*args):
        collecting.append(gc.isenabled())
        warm_up(*args)

    warm_up = ReferenceExecutor.warm_up
    monkeypatch.setattr(ReferenceExecutor, "warm_up", noted)
    graphs, stack = grown(tower, SMALL)
    with stack:
        assert collecting == [False] and gc.isenabled()
        for _ in range(2):
            with graphs.step():
                assert_equals_eager(tower, graphs, LARGE)
        assert collecting == [False, False] and gc.isenabled()
        monkeypatch.setattr(ReferenceExecutor, "warm_up", lambda *args: 1 / 0)
        with pytest.raises(CaptureError):
            graphs.capture()
        assert gc.isenabled()
