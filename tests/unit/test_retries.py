"""When what failed is tried again."""

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.retries import Failures

from ..tape import TapeExecutor
from .towers import draw, graphs_on, new_tower


def test_a_recording_that_failed_is_asked_for_again_less_and_less_often():
    failures, tries = Failures(2), 0
    for _ in range(100):
        failures.ask("bucket")
        if failures.reason("bucket") is None:
            tries += 1
            failures.note("bucket", Fallback.CAPTURE_FAILED)
            failures.note("bucket", Fallback.MODEL_CHANGED)  # the same failure, seen by another part
            assert failures.reason("bucket") is Fallback.CAPTURE_FAILED
    assert tries == 6


def test_a_capture_refused_for_a_hook_is_due_once_the_hook_is_gone():
    tower = new_tower()
    handle = tower.decoder.layers[0].register_forward_hook(lambda *_: None)
    with graphs_on(tower, capture=False, strict=False, executor=TapeExecutor()) as graphs:
        for _ in range(5):
            assert graphs.capture_due
            assert not graphs.capture() and not graphs.capture_due
            tower(*draw([[1, 4, 4]]))
            for _ in range(64):
                if not graphs.capture_due:
                    graphs.begin_step()
        graphs.capture()
        handle.remove()
        assert graphs.capture_due and graphs.capture() and not graphs.capture_due
        tower(*draw([[1, 4, 4]]))
        assert graphs.statistics().fallbacks == {"forward_hooks": 5} and graphs.statistics().replays == 1
