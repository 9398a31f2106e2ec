"""Tensors that a loop gives other memory: their values return to addresses of their own."""

import weakref

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.returning_tensors import ReturningTensors, _in_larger_storage
from bridge_cg_plugin.graphs.virtual_memory import NoDeviceMemory

from .towers import assert_close, forward, graphs_on, new_tower


class FakeMemory:
    """Memory of the CPU, spoiled when it leaves; it holds no tensor that would share it."""

    def __init__(self, device="cpu"):
        self.device, self.room, self.away, self._made = torch.device(device), True, False, []

    def make(self, like):
        if not self.room:
            raise torch.OutOfMemoryError("made to fail")
        made = [_in_larger_storage(tensor).fill_(torch.nan) for tensor in like]
        self._made += map(weakref.ref, made)
        return made

    def release(self):
        self.away = True
        for tensor in [made() for made in self._made]:
            if tensor is not None and tensor.untyped_storage().nbytes():
                tensor.fill_(torch.nan)
        return 100

    def restore(self):
        if not self.room:
            raise NoDeviceMemory("made to fail")
        self.away = False

    def wait(self):
        assert not self.away


@pytest.fixture
def memory():
    return FakeMemory()


@pytest.fixture
def returning(memory):
    return ReturningTensors(memory)


@pytest.fixture
def parameters():
    return [nn.Parameter(torch.rand(size)) for size in (3, 5)]


def load(tensors, scale=1.0):
    """Give tensors other memory, as a loop does; returns their values."""
    for number, tensor in enumerate(tensors):
        tensor.data = torch.arange(float(tensor.numel())) + scale * number
    return [tensor.detach().clone() for tensor in tensors]


def places(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def test_values_return_to_the_same_addresses(returning, parameters):
    found = []
    for scale in (1.0, 2.0, 3.0):
        values = load(parameters, scale)
        returning.settle(parameters)
        assert all(map(torch.equal, parameters, values)) and all(p.requires_grad for p in parameters)
        found.append(places(parameters))
    assert found[0] == found[1] == found[2]


def test_memory_leaves_once_no_tensor_is_there(returning, memory, parameters):
    assert returning.release() == 0
    load(parameters)
    returning.settle(parameters)
    home = places(parameters)
    assert returning.release() == 0 and not memory.away
    load(parameters[:1])
    assert returning.release() == 0 and not memory.away
    values = load(parameters)
    assert returning.release() == 100 and returning.release() == 0
    returning.settle(parameters)
    assert places(parameters) == home and all(map(torch.equal, parameters, values))


def test_what_others_hold_stays(returning, memory, parameters):
    values = load(parameters)
    held = parameters[0].detach()
    before = places(parameters)
    returning.settle(parameters)
    assert places(parameters) == before
    del held
    returning.settle(parameters)
    home = places(parameters)
    kept = [parameter.detach() for parameter in parameters]  # of one model, while the loop has another one there
    others = load(parameters, 7.0)
    returning.settle(parameters)
    assert returning.release() == 0 and not memory.away
    assert all(map(torch.equal, kept, values)) and all(map(torch.equal, parameters, others))
    assert not set(places(parameters)) & set(home)


def leave_as_verl_does(tensor):
    """Free the storage of what a tensor had, where it is just as large."""
    old = tensor.data
    tensor.data = tensor.data.clone()
    if old.untyped_storage().nbytes() == old.nbytes and old.storage_offset() == 0 and old.is_contiguous():
        old.untyped_storage().resize_(0)


def leave_by_force(tensor):
    old = tensor.data
    tensor.data = tensor.data.clone()
    old.untyped_storage().resize_(0)


@pytest.mark.parametrize(("leave", "same"), [(leave_as_verl_does, True), (leave_by_force, False)])
def test_a_loop_may_free_the_storage_that_a_tensor_had(returning, parameters, leave, same):
    found = []
    for scale in (1.0, 2.0, 3.0):
        values = load(parameters, scale)
        returning.settle(parameters)
        found.append(places(parameters))
        for parameter in parameters:
            leave(parameter)
        returning.release()
        assert all(map(torch.equal, parameters, values))
        returning.settle(parameters)
        assert all(map(torch.equal, parameters, values))
    assert not same or found[0] == found[1] == found[2]


def test_without_room_they_stay_where_they_are(returning, memory, parameters):
    memory.room = False
    values = load(parameters)
    before = places(parameters)
    returning.settle(parameters)
    assert places(parameters) == before
    memory.room = True
    returning.settle(parameters)
    home = places(parameters)
    values = load(parameters, 3.0)
    returning.release()
    memory.room = False
    returning.settle(parameters)
    assert memory.away and places(parameters) != home and all(map(torch.equal, parameters, values))
    memory.room = True
    returning.settle(parameters)
    assert places(parameters) == home and all(map(torch.equal, parameters, values))


def test_a_tensor_of_another_shape_gets_another_place(returning, parameters):
    load(parameters)
    returning.settle(parameters)
    parameters[0].data = torch.ones(8)
    returning.settle(parameters)
    assert torch.equal(parameters[0], torch.ones(8)) and parameters[1].numel() == 5


class Quantized(nn.Parameter):
    """Stands for parameters of a class of their own, which have further tensors."""


@pytest.mark.parametrize(
    "tensor",
    [
        Quantized(torch.ones(3)),
        nn.Parameter(torch.ones(3, 2).t()),
        nn.Parameter(torch.ones(3, device="meta")),
    ],
    ids=["of a class of its own", "not contiguous", "off the device"],
)
def test_other_tensors_stay(returning, tensor):
    before = tensor.untyped_storage()._cdata
    returning.settle([tensor])
    assert tensor.untyped_storage()._cdata == before


class Returning(ReferenceExecutor):
    """Gives tensors addresses of their own; counts what it records."""

    recorded = 0

    def __init__(self):
        super().__init__()
        self.memory = FakeMemory()

    def returning_tensors(self):
        return ReturningTensors(self.memory)

    def record(self, body, pool):
        self.recorded += 1
        return super().record(body, pool)


def test_graphs_of_weights_that_leave_and_come_back_are_recorded_once_more():
    tower, reference = new_tower().requires_grad_(False), new_tower().requires_grad_(False)
    executor, counts = Returning(), []
    with graphs_on(tower, buckets=(16,), executor=executor) as graphs:
        for number in range(4):
            weights = [(0.5 + number) * parameter.detach().cpu() for parameter in reference.parameters()]
            for parameter, mirrored, weight in zip(tower.parameters(), reference.parameters(), weights, strict=True):
                parameter.data, mirrored.data = weight.clone(), weight
            assert (graphs.release_memory() > 0) == (number > 0)
            for seed in range(2):
                with graphs.step(), torch.no_grad():
                    found, expected = (forward(model, [[1, 4, 4]], seed) for model in (tower, reference))
                assert_close(found, expected)
            counts.append(executor.recorded)
        assert graphs.statistics().replays == 8 and not graphs.statistics().fallbacks
    assert counts[0] == counts[-1]
