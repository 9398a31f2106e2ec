"""Memory that weights of many regions have together."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.memory import tensor_homes
from bridge_cg_plugin.graphs.memory.joint_memory import JointMemories
from bridge_cg_plugin.graphs.memory.returning_tensors import ReturningTensors

from ..returning import CPU, Memories


@pytest.fixture
def memory():
    return Memories()


@pytest.fixture
def joint(memory):
    return JointMemories(memory.new)


class Region:
    """Tensors of one region."""

    def __init__(self, joint):
        self.returning = ReturningTensors(CPU, joint.new)
        self.parameters = [nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(2, 3))]
        self.values = [parameter.detach().clone() for parameter in self.parameters]

    def leave(self):
        for parameter in self.parameters:
            parameter.data = torch.empty(0)
        return self.returning.release()

    def load(self):
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data = value.clone()

    def settle(self):
        """Bring the tensors to their addresses, which are returned."""
        self.load()
        self.returning.settle(self.parameters)
        assert all(map(torch.equal, self.parameters, self.values))
        return [parameter.data_ptr() for parameter in self.parameters]


def test_regions_share_memory_that_leaves_with_the_last_and_returns_with_the_first(joint, memory):
    regions = [Region(joint) for _ in range(3)]
    homes = [region.settle() for region in regions]
    for _ in range(2):
        assert [region.leave() for region in regions] == [0, 0, 100]
        assert memory.away and regions[0].returning.release() == 0
        assert regions[1].settle() == homes[1] and not memory.away
        assert [regions[0].settle(), regions[2].settle()] == [homes[0], homes[2]]
    assert len(memory.made) == 1


def test_a_region_that_comes_while_memory_is_away_brings_it_back(joint, memory):
    first, second = Region(joint), Region(joint)
    home = first.settle()
    assert first.leave() == 100
    second.settle()
    assert not memory.away and first.settle() == home
    assert second.leave() == 0 and first.leave() == 100 and len(memory.made) == 1


def test_no_memory_is_larger_than_a_group_unless_one_tensor_is(joint, memory, monkeypatch):
    monkeypatch.setattr(tensor_homes, "GROUP_BYTES", 40)
    regions = [Region(joint) for _ in range(3)]
    homes = [region.settle() for region in regions]
    assert len(memory.made) == 3
    assert [region.leave() for region in regions] == [100, 100, 100] and all(each.away for each in memory.made)
    assert [region.settle() for region in regions] == homes


def test_memory_stays_while_a_tensor_of_a_region_that_is_gone_has_some(joint, memory):
    first, second = Region(joint), Region(joint)
    first.settle()
    second.settle()
    kept, values = second.parameters, second.values
    del second
    assert first.leave() == 0 and not memory.away
    assert all(map(torch.equal, kept, values))
    del kept
    first.settle()
    assert first.leave() == 100


def test_memory_without_room_stays_away_and_returns_later(joint, memory):
    regions = [Region(joint) for _ in range(2)]
    homes = [region.settle() for region in regions]
    for region in regions:
        region.leave()
    memory.room = False
    for region in regions:
        assert region.settle() not in homes
    assert memory.away
    memory.room = True
    assert [region.settle() for region in regions] == homes


class ReturnsOnly(Memories):
    """Has room for what was made, and for nothing more."""

    full = False

    def new(self, device):
        made = super().new(device)
        make = made.make

        def make_if_there_is_room(like):
            if self.full:
                raise torch.OutOfMemoryError("made to fail")
            return make(like)

        made.make = make_if_there_is_room
        return made


def test_memory_that_came_back_for_a_region_without_room_leaves_again():
    memory = ReturnsOnly()
    joint = JointMemories(memory.new)
    first, second = Region(joint), Region(joint)
    home = first.settle()
    first.leave()
    memory.full = True
    second.settle()
    assert memory.away and first.settle() == home
