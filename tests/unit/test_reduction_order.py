"""The order in which bucket groups start their reductions, whatever the order in which they are ready."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.upstream.parallel.data_parallel import ReductionOrder


class Group:
    """A bucket group as megatron-core's: finishing one that never started is an error, but in its first batch."""

    def __init__(self, number, log, first_batch=False):
        self.number, self.log, self.is_first_batch, self.running = number, log, first_batch, False
        self.per_param_grad_ready_counts = {}

    def start_grad_sync(self, force_all_reduce=False):
        self.log.append((self.number, force_all_reduce))
        self.running = True

    def finish_grad_sync(self, force_all_reduce=False):
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
        assert self.running, "Communication call has not been issued for this bucket"
        self.running = False


def in_order(count, first_batch=False, later=frozenset()):
    log = []
    groups = [Group(i, log, first_batch) for i in range(count)]
    order = ReductionOrder(groups, [{number} for number in range(count)])
    order.keep(lambda parameters: not parameters.isdisjoint(later))
    return groups, order, log


@given(ready=st.permutations(range(6)) | st.lists(st.integers(0, 5), unique=True), steps=st.integers(1, 3))
def test_groups_start_in_one_order_whichever_is_ready_first(ready, steps):
    """As many as are ready without a gap start at once, those behind one without gradients before they are finished."""
    groups, _, log = in_order(6)
    for _ in range(steps if len(ready) == 6 else 1):
        for known, number in enumerate(ready, 1):
            groups[number].start_grad_sync(force_all_reduce=True)
            assert [n for n, _ in log] == list(range(next(i for i in range(7) if i not in ready[:known])))
        for group in groups:
            with nullcontext() if group.number in ready else pytest.raises(AssertionError, match="has not been issued"):
                group.finish_grad_sync()
        assert log == [(number, True) for number in sorted(ready)]
        log.clear()


@pytest.mark.parametrize("counted, issued", [([], True), (["of another module"], True), (["ours"], False)])
def test_groups_of_a_module_that_did_not_run_start_in_order_when_the_first_is_finished(counted, issued):
    log = []
    groups = [Group(i, log) for i in range(3)]
    order = ReductionOrder(groups, [set(), set(), set()], {"ours", "ours too"})
    order.keep(lambda parameters: False)
    for _ in range(2):
        groups[0].per_param_grad_ready_counts = dict.fromkeys(counted, 1)
        if issued:
            for group in groups:
                group.finish_grad_sync(force_all_reduce=True)
            assert log == [(0, True), (1, True), (2, True)]
            log.clear()
    if not issued:
        with pytest.raises(AssertionError, match="has not been issued"):
            groups[0].finish_grad_sync()  # it ran, and left parameters out: upstream's error
    order.remove()
    with pytest.raises(AssertionError, match="has not been issued"):
        groups[0].finish_grad_sync()


def test_what_somebody_put_around_it_stays_without_effect():
    groups, order, log = in_order(2)
    ours = groups[1].start_grad_sync
    groups[1].start_grad_sync = lambda **kwargs: ours(**kwargs)
    order.remove()
    groups[1].start_grad_sync()
    assert log == [(1, False)]


def test_a_replay_that_never_comes_holds_no_reduction_beyond_the_step():
    groups, _, log = in_order(2, later={0, 1})
    for group in groups:
        group.start_grad_sync()
    assert log == []
    for group in groups:
        group.finish_grad_sync()
    assert [n for n, _ in log] == [0, 1]
