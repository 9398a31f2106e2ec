"""Tensors that a loop gives other memory: their values return to addresses of their own."""

import numpy
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bridge_cg_plugin.graphs.memory import tensor_homes
from bridge_cg_plugin.graphs.memory.returning_tensors import ReturningTensors
from bridge_cg_plugin.graphs.planning.buckets import Bucket

from ..regions import new_region
from ..returning import CPU, Memories, Returning
from ..rows_program import RowsProgram
from .towers import assert_close, forward, graphs_on, new_tower


@pytest.fixture
def memory():
    return Memories()


@pytest.fixture
def returning(memory):
    return ReturningTensors(CPU, memory.new)


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


class FewAtATime(Memories):
    """Has room for so many memories, and notes how many of some storages were freed before each was made."""

    def __init__(self, storages, most):
        super().__init__()
        self._storages, self.most, self.freed = storages, most, []

    def new(self, device):
        self.room = len(self.made) < self.most
        self.freed.append(sum(storage.expired() for storage in self._storages))
        return super().new(device)


@pytest.fixture
def many(monkeypatch):
    """Return parameters in four groups."""
    monkeypatch.setattr(tensor_homes, "GROUP_BYTES", 16)
    made = [nn.Parameter(torch.rand(size)) for size in (3, 5, 2, 2, 4)]
    load(made)
    return made


def test_one_group_after_the_other_has_two_copies(many):
    memory = FewAtATime([StorageWeakRef(each.untyped_storage()) for each in many], 4)
    returning = ReturningTensors(CPU, memory.new)
    returning.settle(many)
    assert memory.freed == [0, 1, 2, 4]
    home = places(many)
    values = load(many, 5.0)
    assert returning.release() == 400
    returning.settle(many)
    assert places(many) == home and all(map(torch.equal, many, values)) and len(memory.made) == 4


def test_groups_without_room_stay_where_they_are_until_there_is(many):
    values, before = [each.detach().clone() for each in many], places(many)
    memory = FewAtATime([], 2)
    returning = ReturningTensors(CPU, memory.new)
    returning.settle(many)
    first = places(many)
    assert all(map(torch.equal, many, values)) and first[2:] == before[2:] and not set(first[:2]) & set(before)
    memory.most = 9
    values = load(many, 5.0)
    returning.settle(many)
    home = places(many)
    assert home[:2] == first[:2] and all(map(torch.equal, many, values))
    load(many, 6.0)
    returning.settle(many)
    assert places(many) == home


def test_groups_that_are_there_stay_while_others_have_no_room(many):
    """Recordings of each state of a model ask; those of the last one would otherwise be of addresses that are gone."""
    memory = FewAtATime([], 2)
    returning = ReturningTensors(CPU, memory.new)
    returning.settle(many)
    first, made = places(many), list(memory.made)
    for memory.most in (4, 9):
        returning.settle(many)
        assert places(many) == first and memory.made == made
    values, memory.room = load(many, 5.0), True
    assert returning.release() == 200
    returning.settle(many)
    assert places(many)[:2] == first[:2] and all(map(torch.equal, many, values))


def test_what_a_loop_keeps_of_tensors_that_got_another_place_stays(returning, memory, parameters):
    values = load(parameters)
    returning.settle(parameters)
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.double()
    returning.settle(parameters)
    load(parameters)
    assert returning.release() == 100 and memory.away
    assert len(memory.made) == 2 and all(map(torch.equal, kept, values))


def test_other_tensors_than_last_time_get_another_place(returning, memory, parameters):
    _, left = parameters
    values = load(parameters)
    returning.settle(parameters)
    others = [parameters[0], nn.Parameter(torch.rand(5))]
    load(others, 4.0)
    returning.settle(others)
    assert torch.equal(left, values[1])
    load(others, 5.0)
    assert returning.release() == 100 and torch.equal(left, values[1])


def test_tensors_that_are_there_stay_for_recordings_that_were_made_elsewhere(returning, memory, parameters):
    load(parameters)
    returning.settle(parameters)
    home = places(parameters)
    returning.settle(parameters)
    returning.settle(parameters[:1])
    returning.settle([])
    assert places(parameters) == home and len(memory.made) == 1


def test_memory_of_others_stays(returning, parameters):
    array = numpy.arange(3.0, dtype=numpy.float32)
    parameters[0].data = torch.from_numpy(array)
    before = places(parameters)
    returning.settle(parameters)
    array[0] = 9.0
    assert places(parameters) == before and parameters[0][0] == 9.0


def test_in_the_end_tensors_have_memory_of_pytorchs(returning, memory, parameters):
    returning.stop()
    values = load(parameters)
    returning.settle(parameters)
    home = places(parameters)
    returning.stop()
    assert memory.away and all(map(torch.equal, parameters, values)) and not set(places(parameters)) & set(home)


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


def new_linear_region(linear, executor):
    region = new_region(RowsProgram(linear, (4,)), executor, [Bucket(8)])
    region.capture()
    return region


def move(module):
    """Give a module's weights other memory, which nobody else has."""
    for parameter in module.parameters():
        parameter.data = parameter.detach().clone()


def places_of(module):
    return places(module.parameters())


def equals_eager(region, linear):
    x = torch.rand(8, 4)
    with torch.no_grad():
        (found,) = region.run(x)
        return torch.equal(found, linear(x))


def test_weights_that_two_regions_read_stay_where_they_are():
    linear = nn.Linear(4, 4)
    one, other = new_linear_region(linear, Returning()), new_linear_region(linear, Returning())
    for _ in range(3):
        move(linear)
        before = places_of(linear)
        assert equals_eager(one, linear) and equals_eager(other, linear)
        assert places_of(linear) == before
    other.reset()
    move(linear)
    before = places_of(linear)
    assert equals_eager(one, linear) and places_of(linear) != before


def seem_to_have_other_memory(region, tensor):
    """Let a tensor's storage be another one than a region recorded, at the same address."""
    source = region.sources.current
    (number,) = (number for number, each in enumerate(source.reads) if each is tensor)
    source._storages[number] = StorageWeakRef(torch.empty(1).untyped_storage())


def test_weights_that_returned_to_their_address_by_chance_get_addresses_of_their_own_with_the_others():
    """Otherwise each round in which further ones have other addresses would record again."""
    linear, executor, counts = nn.Linear(4, 4), Returning(), []
    region = new_linear_region(linear, executor)
    seem_to_have_other_memory(region, linear.weight)
    linear.bias.data = linear.bias.detach().clone()
    for _ in range(3):
        assert equals_eager(region, linear)
        counts.append(executor.recorded)
        move(linear)
    assert len(set(counts)) == 1, counts


def test_a_region_that_is_reset_leaves_weights_in_memory_of_pytorchs():
    linear, executor = nn.Linear(4, 4), Returning()
    region = new_linear_region(linear, executor)
    move(linear)
    assert equals_eager(region, linear)
    home = places_of(linear)
    region.reset()
    assert executor.memory.away and not set(places_of(linear)) & set(home)
