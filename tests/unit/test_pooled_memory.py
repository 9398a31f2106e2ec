"""Memory of PyTorch's pools that weights return to, with a PyTorch that keeps segments as its allocator does."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from bridge_cg_plugin.graphs.memory import releasable_pools as pools_module
from bridge_cg_plugin.graphs.memory import tensor_homes
from bridge_cg_plugin.graphs.memory.joint_memory import JointMemories
from bridge_cg_plugin.graphs.memory.releasable_pools import ReleasablePools
from bridge_cg_plugin.graphs.memory.returning_tensors import ReturningTensors
from bridge_cg_plugin.graphs.memory.tensor_homes import PooledMemory

from ..fake_device import FakeVirtualMemory

DEVICE = torch.device("cuda", 0)


class Pool:
    """Stands for a pool of PyTorch's."""


class FakePyTorch:
    """Keeps a segment of a pool as long as the pool is there or a tensor has it, and then until its cache is emptied.

    Attributes:
        looks: How often somebody looked at its memory.
        filling: How many tensors it may be filling, as it does where algorithms are to be deterministic.
    """

    def __init__(self, device):
        self.device, self.looks, self.filling = device, 0, 0
        self._pool, self._segments = None, {}

    def new_pools(self, device, owner):
        self._pools = ReleasablePools(device, owner, self.device)
        return self._pools

    @contextmanager
    def allocating_in(self, pool, device):
        self._pool = weakref.ref(pool)
        yield

    def new_tensor(self, like):
        address = self._pools._new_memory(like.nbytes, 0, None)
        if not address:
            raise torch.OutOfMemoryError("too little memory")
        made = torch.zeros_like(like)
        self._segments[address] = self._pool, weakref.ref(made)
        self.filling += 1
        return made

    def synchronize(self, device=None):
        self.filling = 0

    def empty_cache(self):
        kept = {a: (pool, made) for a, (pool, made) in self._segments.items() if pool() or made() is not None}
        self._segments = kept

    def memory_snapshot(self):
        self.looks += 1
        return [{"address": address} for address in self._segments]


@pytest.fixture
def pytorch(monkeypatch):
    made = FakePyTorch(FakeVirtualMemory(64))
    monkeypatch.setattr(pools_module, "_made", [])
    for name in ("empty_cache", "memory_snapshot", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(ReleasablePools, "new_pool", lambda self: Pool())
    monkeypatch.setattr(tensor_homes, "releasable_pools", made.new_pools)
    monkeypatch.setattr(tensor_homes, "allocating_in", made.allocating_in)
    monkeypatch.setattr(tensor_homes, "in_larger_storage", made.new_tensor)
    return made


def of_size(*sizes):
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_memory_that_has_left_or_is_there_costs_no_look(pytorch):
    memory = PooledMemory(DEVICE)
    made = memory.make(of_size(16))
    assert memory.release() == 16
    looks = pytorch.looks
    assert memory.release() == 0 and pytorch.looks == looks
    for _ in range(2):
        memory.restore()
        assert pytorch.device.mapped_bytes == 16
    assert pytorch.looks == looks and made


def test_nothing_is_filled_any_more_once_memory_is_made(pytorch):
    """PyTorch fills it on another stream than weights are copied on."""
    made = PooledMemory(DEVICE).make(of_size(16, 8))
    assert not pytorch.filling and made


def test_memory_without_room_for_all_goes_back(pytorch):
    """Otherwise the device has less than before for the microbatch that runs with weights where they are."""
    memory = PooledMemory(DEVICE)
    made = memory.make(of_size(16))
    with pytest.raises(torch.OutOfMemoryError):
        memory.make(of_size(16, 16, 24))
    assert pytorch.device.mapped_bytes == 16 and made
    memory.release()
    memory.restore()
    assert pytorch.device.mapped_bytes == 16


def test_memory_of_a_part_that_is_gone_goes_back_with_pytorchs_cache(pytorch):
    memory = PooledMemory(DEVICE)
    gone, stays = memory.make(of_size(16)), memory.make(of_size(24))
    del gone
    pytorch.empty_cache()
    assert memory.release() == 24 and stays
    memory.restore()
    assert pytorch.device.mapped_bytes == 24


def test_weights_without_room_take_no_memory(pytorch):
    returning = ReturningTensors(torch.device("cpu"), JointMemories(lambda device: PooledMemory(DEVICE)).new)
    returning.settle(of_size(16, 24, 32))
    assert pytorch.device.mapped_bytes == 0
