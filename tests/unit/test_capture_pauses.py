"""What a capture makes a step wait for, and what is counted of it."""

import gc

import pytest

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from .growing import LARGE, SMALL, assert_equals_eager, grown
from .towers import new_tower


@pytest.fixture(scope="module")
def tower():
    return new_tower()


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
