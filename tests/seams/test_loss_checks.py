"""Checks of losses and gradients of megatron-core's state machine: read once, with upstream's own error."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks import train_loop
from tests.unit.waits import HostWait, no_host_waits

CHECKS = {torch.isnan: "found NaN in {}", torch.isinf: "found Inf in {}"}


@pytest.fixture
def on_graphs(active, monkeypatch):
    monkeypatch.setattr(train_loop, "any_on_graphs", lambda: True)
    # Upstream names the device in its error.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def new_machine():
    return RerunStateMachine(mode=RerunMode.DISABLED)


def check_all(machine, values):
    """Check values as a step's losses and gradient norms are, then change them in place, as schedules do."""
    for index, value in enumerate(values):
        for rejects, message in CHECKS.items():
            machine.validate_result(result=value, rejection_func=rejects, message=message.format(index), fatal=True)
        value /= 2


def step(machine, numbers, while_launched=no_host_waits):
    """Run a step; returns the error, which comes before the optimizer's step."""
    try:
        while machine.should_run_forward_backward(None):
            values = [torch.tensor(number) for number in numbers]
            with while_launched():
                check_all(machine, values)
    except RuntimeError as error:
        return str(error)
    return None


def upstreams(numbers):
    """Return the error of the same step without the plugin."""
    bridge_cg_plugin.deactivate()
    try:
        return step(new_machine(), numbers, nullcontext)
    finally:
        bridge_cg_plugin.activate()


numbers = st.lists(st.sampled_from((1.0, float("nan"), float("inf"), -float("inf"))), max_size=6)


@settings(max_examples=25, deadline=None)
@given(numbers)
def test_the_error_is_upstreams_of_the_first_rejected_value(numbers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        expected = upstreams(numbers)
        patch.setattr(train_loop, "any_on_graphs", lambda: True)
        assert step(new_machine(), numbers) == expected
    assert (expected is None) == all(number == 1.0 for number in numbers)


def rejecting_at_once(machine):
    with pytest.raises(RuntimeError, match="found NaN in 0"):
        check_all(machine, [torch.tensor(float("nan"))])


def test_without_graphs_a_check_is_read_at_once(active, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = new_machine()
    assert machine.should_run_forward_backward(None)
    rejecting_at_once(machine)


def test_outside_of_a_step_a_check_is_read_at_once(on_graphs):
    """Evaluation and other loops do not ask the state machine whether to run."""
    machine = new_machine()
    rejecting_at_once(machine)
    assert step(machine, [1.0]) is None
    rejecting_at_once(machine)


@pytest.mark.parametrize(
    "change", [{"fatal": False}, {"rejection_func": lambda value: value > 0}], ids=["warns", "other"]
)
def test_checks_of_other_kinds_are_read_at_once(on_graphs, change):
    machine = new_machine()
    assert machine.should_run_forward_backward(None)
    call = {"result": torch.tensor(float("nan")), "rejection_func": torch.isnan, "message": "m", **change}
    with pytest.raises(HostWait), no_host_waits():
        machine.validate_result(**call)


def test_where_steps_may_be_run_again_upstream_decides(on_graphs, monkeypatch):
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(machine, "_save_state", lambda: None)
    assert machine.should_run_forward_backward(None)
    assert machine not in train_loop._pending
