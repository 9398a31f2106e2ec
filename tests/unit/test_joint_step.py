"""A training step of several modules: each records one bucket at most before it."""

from contextlib import ExitStack

import pytest

from .growing import LARGE, SMALL, assert_equals_eager, capacities, grown
from .towers import new_tower


@pytest.mark.reference_executor
def test_two_towers_record_one_bucket_each_before_a_step_and_equal_eager():
    towers = [new_tower(), new_tower()]
    (first, stack), (second, other) = (grown(tower, SMALL) for tower in towers)
    both = [first, second]
    with stack, other:
        for wanted in (1, 2, 2):
            with ExitStack() as step:
                for graphs in both:
                    step.enter_context(graphs.step())
                assert [len(capacities(graphs)) for graphs in both] == [wanted] * 2
                for tower, graphs in zip(towers, both, strict=True):
                    assert_equals_eager(tower, graphs, LARGE)
        pauses = [graphs.statistics() for graphs in both]
        assert all(each.pause_seconds == each.longest_pause > 0 for each in pauses)
