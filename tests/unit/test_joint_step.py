"""A training step of several modules: one of them at most records before it, none waits for ever, ranks do alike."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.manager import joint_step

from .growing import LARGE, SMALL, assert_equals_eager, capacities, grown
from .towers import new_tower


class Module:
    """Records before a step that it may record before, if it wants to."""

    def __init__(self, ranks=(), wants=()):
        self.bucket_consensus = SimpleNamespace(ranks=ranks)
        self.wants, self.turn, self.recorded = list(wants), 0, False
        self.allowed, self.made = [], []

    @contextmanager
    def step(self, may_record):
        self.allowed.append(may_record)
        self.recorded = may_record and bool(self.wants) and self.wants[0] <= self.turn
        if self.recorded:
            self.made.append((self.wants.pop(0), self.turn))
        self.turn += 1
        yield


wishes = st.lists(st.integers(0, 12), max_size=4).map(sorted)


def run(modules, steps=60):
    for step in range(steps):
        with joint_step(modules):
            assert sum(module.recorded for module in modules) <= 1, step


@given(st.lists(wishes, max_size=4))
def test_all_get_what_they_want_one_a_step(wants):
    modules = [Module(wants=each) for each in wants]
    run(modules)
    assert not any(module.wants for module in modules)
    for module, each in zip(modules, wants, strict=True):
        # What is wanted first comes at once in a module's own turn.
        assert not module.made or module.made[0][1] - each[0] < len(modules)


@given(wishes, wishes, wishes)
def test_what_a_module_may_do_depends_on_no_module_of_other_ranks(wants, other, another):
    """Ranks that share a module may see different wishes of the other one: they must wait for each other alike."""
    found = []
    for each in (other, another):
        modules = [Module(ranks=(0, 1), wants=wants), Module(wants=each)]
        run(modules)
        assert not any(module.wants for module in modules)
        found.append((modules[0].allowed, modules[0].made))
    assert found[0] == found[1]


@pytest.mark.reference_executor
def test_two_towers_record_before_different_steps_and_equal_eager():
    towers = [new_tower(), new_tower()]
    (first, stack), (second, other) = (grown(tower, SMALL) for tower in towers)
    both = [first, second]
    with stack, other:
        for wanted in ([1, 1], [1, 2], [2, 2]):
            with joint_step(both):
                assert sorted(len(capacities(graphs)) for graphs in both) == wanted
                for tower, graphs in zip(towers, both, strict=True):
                    assert_equals_eager(tower, graphs, LARGE)
        pauses = [graphs.statistics().pauses for graphs in both]
        assert sorted(step for each in pauses for step in each) == [2, 3] and all(map(len, pauses))
        fallbacks = [graphs.statistics().fallbacks["not_captured_yet"] for graphs in both]
        assert sorted(fallbacks) == [1, 2]
