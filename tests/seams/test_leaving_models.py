"""Models of other loops whose parameters leave the device and return, with the memory of their graphs."""

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.graphs.memory import returning
from bridge_cg_plugin.graphs.memory.returning import ReturningStorages
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.environment import memory_may_leave
from bridge_cg_plugin.upstream.hooks import leaving_models
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from tests.leaving import LeavingExecutor
from tests.returning import Filled

from .loops import Policy, assert_equal, call

pytestmark = pytest.mark.usefixtures("loop")


@pytest.fixture
def asked_for(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "1")


@pytest.fixture
def leaving(monkeypatch, asked_for):
    """Give models executors whose memory leaves; returns these, and for which memory may."""
    made = []

    def executor(*args, releasable=False, **kwargs):
        made.append(LeavingExecutor() if releasable else ReferenceExecutor())
        return made[-1]

    monkeypatch.setattr(helpers, "default_executor", executor)
    return made


def leave_the_device(model):
    """Free parameters as loops do before they generate; returns what puts them back elsewhere."""
    before = [(parameter, parameter.data.clone()) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.data.untyped_storage().resize_(0)

    def back():
        for parameter, kept in before:
            parameter.data = kept

    return back


@pytest.fixture
def parameters_count_as_on_the_device(monkeypatch):
    monkeypatch.setattr(leaving_models, "is_on_device", lambda parameter: True)


@pytest.mark.parametrize("calls", [0, 3], ids=["before capture", "on graphs"])
def test_a_reference_pass_before_any_weight_is_loaded_is_an_error_and_later_ones_are_right(calls):
    eager, reference = Policy(vision_cuda_graph_impl="none").eval(), Policy().eval()
    with torch.no_grad():
        for seed in range(calls):
            call(reference, 2, forward_only=True, seed=seed)
        back = leave_the_device(reference.vision_model)
        with pytest.raises(RuntimeError):
            call(reference, 2, forward_only=True)
        back()
        for seed in range(4):
            actual = call(reference, 2, forward_only=True, seed=seed)
            assert_equal(actual, call(eager, 2, forward_only=True, seed=seed))
    assert active_graphs()[0].statistics().replays >= 4


def test_graphs_leave_with_their_model_and_return_with_the_next_call(leaving, parameters_count_as_on_the_device):
    eager, model, other = Policy(vision_cuda_graph_impl="none"), Policy(), Policy(1)
    for _ in range(3):
        call(model, 2)
        call(other, 2)
    torch.cuda.empty_cache()
    policy, reference = leaving
    assert not policy.memory_away and not reference.memory_away
    for seed in range(3):
        back = leave_the_device(model.vision_model)
        torch.cuda.empty_cache()
        assert policy.memory_away and not reference.memory_away
        torch.cuda.empty_cache()
        back()
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
        assert policy.returned == policy.left == seed + 1
    assert not active_graphs()[0].statistics().fallbacks["memory_released"]


def test_memory_of_every_model_leaves_when_the_loop_says_so(leaving):
    eager, models = Policy(vision_cuda_graph_impl="none"), [Policy(), Policy()]
    assert bridge_cg_plugin.release_memory() == 0
    for model in models:
        for _ in range(3):
            call(model, 2)
    assert bridge_cg_plugin.release_memory() == 200
    assert_equal(call(models[0], 2, seed=5), call(eager, 2, seed=5))
    assert [executor.memory_away for executor in leaving] == [False, True]


def test_its_switch_is_spelled_as_the_plugins_own(monkeypatch):
    for value, may_leave in {"true": True, " ON ": True, "off": False, "": False}.items():
        monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", value)
        assert memory_may_leave() is may_leave, value
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "yes")
    with pytest.raises(OptionError, match="BRIDGE_CG_RELEASE_MEMORY=.*0, false, off .off. or 1, true, on .on."):
        call(Policy(), 1)


@pytest.fixture
def homes(asked_for, monkeypatch, parameters_count_as_on_the_device):
    """Return what is made for storages of 16 bytes and more, and of several tensors."""
    made = []
    storages = ReturningStorages(lambda device: made.append(Filled(device)) or made[-1])
    monkeypatch.setattr(returning, "LEAST_BYTES", 16)
    monkeypatch.setattr(leaving_models, "STORAGES", storages)
    return made


def test_buffers_that_a_loop_frees_and_fills_are_followed_while_the_plugin_is_on(homes):
    before = torch.cuda.empty_cache
    model, other = Policy(), torch.zeros(8)
    weight = next(model.vision_model.parameters())
    weight.main_grad = torch.zeros(weight.shape)
    call(model, 1)
    for tensor in (weight.data, weight.main_grad, other):
        kept = tensor.clone()
        tensor.storage().resize_(0)
        tensor.storage().resize_(kept.numel())
        assert torch.equal(tensor.copy_(kept), kept)
    assert sum(home.filled for home in homes) == 2 and torch.cuda.empty_cache is not before
    bridge_cg_plugin.deactivate()
    assert "resize_" not in vars(torch.UntypedStorage) and torch.cuda.empty_cache is before
