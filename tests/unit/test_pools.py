"""What recordings of a slot take memory from, with a PyTorch that has its pools' blocks as its allocator does."""

import pytest
import torch

from bridge_cg_plugin.announce import announce_once
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory import pools
from bridge_cg_plugin.graphs.memory.pools import Arena, PlainMemory
from bridge_cg_plugin.graphs.memory.ranges import AddressRange
from bridge_cg_plugin.graphs.recordings import executor as executor_module
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor

from ..fake_device import FakeVirtualMemory
from .test_ranges import allocate

CPU = torch.device("cpu")


class FakePool:
    """A pool of PyTorch's."""

    count = 0

    def __init__(self):
        FakePool.count += 1
        self.id = (300 + FakePool.count, 0)


class FakePyTorch:
    """Has blocks in pools; some become free once garbage is collected.

    Attributes:
        blocks: By the handle of their pool: address, size and state of each.
        collected: Whether garbage was collected.
    """

    def __init__(self):
        self.blocks, self.collected = {}, False

    def memory_snapshot(self, include_traces):
        """As PyTorch's: a look at one pool alone breaks the numbers that it is asked for by."""
        return [
            {"segment_pool_id": handle, "total_size": sum(size for _, size, _ in blocks), "blocks": self._of(blocks)}
            for handle, blocks in self.blocks.items()
        ]

    def _of(self, blocks):
        states = {"garbage": "inactive" if self.collected else "active_allocated"}
        return [{"address": a, "size": size, "state": states.get(state, state)} for a, size, state in blocks]

    def collect(self):
        self.collected = True


@pytest.fixture
def pytorch(monkeypatch):
    made = FakePyTorch()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.memory_snapshot)
    monkeypatch.setattr(pools.gc, "collect", made.collect)
    monkeypatch.setattr(torch.cuda, "MemPool", FakePool)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(AddressRange, "new_pool", lambda self: FakePool())
    return made


@pytest.fixture
def device():
    return FakeVirtualMemory(1 << 10)


@pytest.fixture
def arena(device, pytorch):
    return Arena(lambda: AddressRange(device, 1 << 9))


def test_recordings_lie_over_each_other_and_say_what_they_need(arena, device):
    needed = []
    for sizes in ((40, 16), (8,), (100, 8), (24,)):
        pool = arena.begin()
        addresses = [allocate(pool._addresses, size) for size in sizes]
        assert addresses[0] == pool._addresses.first
        needed.append(pool.settle())
    assert needed == [56, 8, 112, 24] and arena.nbytes == device.mapped_bytes == 112
    arena.keep(max(needed[:2]))
    assert arena.nbytes == 56


def test_what_is_free_or_garbage_may_be_overwritten(arena, pytorch):
    pool = arena.begin()
    pytorch.blocks = {pool.handle: [(0, 512, "inactive"), (512, 512, "active_awaiting_free"), (1024, 512, "garbage")]}
    pytorch.blocks[1, 0] = [(0, 512, "active_allocated")]  # somebody else's
    pool.settle()
    assert pytorch.collected


def test_what_lives_on_is_refused_and_never_overwritten(arena, pytorch):
    kept = torch.zeros(3, 4)
    pool = arena.begin()
    allocate(pool._addresses, 64)
    pytorch.blocks = {pool.handle: [(kept.data_ptr(), 64, "active_allocated"), (0, 512, "active_allocated")]}
    with pytest.raises(CaptureError, match=r"made 64 bytes, 512 bytes, which is kept"):
        pool.settle()
    later = arena.begin()
    assert allocate(later._addresses, 64) != pool._addresses.first


def test_what_a_failed_capture_left_is_not_overwritten(arena, pytorch):
    """It lives in frames of the error, and PyTorch would free what comes next in its place."""
    failed = arena.begin()
    first = allocate(failed._addresses, 64)
    pytorch.blocks = {failed.handle: [(first, 64, "active_allocated")]}
    later = arena.begin()
    assert allocate(later._addresses, 64) != first and arena.nbytes == 128
    pytorch.blocks = {}
    assert later.settle() == 64
    assert allocate(arena.begin()._addresses, 64) == later._addresses.first
    del failed
    assert arena.nbytes == 64


def test_a_failed_capture_that_left_nothing_costs_no_addresses(arena, pytorch):
    first = allocate(arena.begin()._addresses, 64)
    assert allocate(arena.begin()._addresses, 64) == first


def test_a_plain_pool_gives_all_back_or_nothing(pytorch):
    memory = PlainMemory()
    pytorch.blocks = {memory.handle: [(0, 512, "active_allocated")], (1, 0): [(0, 64, "inactive")]}
    handle = memory.handle
    assert memory.begin().settle() == memory.nbytes == 512 and memory.handle == handle
    memory.keep(8)
    assert memory.handle == handle
    memory.keep(0)
    assert memory.handle != handle and memory.nbytes == 0


def test_a_plain_pool_that_all_graphs_left_is_not_used_again(pytorch):
    """PyTorch refuses to capture there: its host memory counts graphs, too, and is over with the last one."""
    memory = PlainMemory()
    handle = memory.begin().handle
    pytorch.blocks = {handle: [(0, 512, "active_allocated"), (512, 64, "inactive")]}
    assert memory.begin().handle == handle
    pytorch.blocks = {handle: [(0, 576, "inactive")]}
    assert memory.begin().handle != handle


def test_captures_in_a_plain_pool_take_no_expandable_segments(pytorch, monkeypatch):
    """verl sets them between generation and training; NCCL registers what graphs exchange, and may not there."""
    changes, written = [], "max_split_size_mb:64,expandable_segments:True"
    found = {"allocator_settings": {"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": written}}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda *given: found, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append, raising=False)
    with PlainMemory().begin().taking():
        assert changes == [f"{written},expandable_segments:False"]
    assert changes[-1] == written


@pytest.fixture
def executor(monkeypatch, pytorch, device):
    """An executor whose constructor would need a GPU."""
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("GPU", (), {"total_memory": 512}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(executor_module, "driver_of", lambda found: device)
    monkeypatch.setattr(executor_module, "ReplayStream", lambda *given: None)
    monkeypatch.setattr(executor_module, "_recording_stream", lambda *given: None)
    monkeypatch.setattr(executor_module, "making_in", lambda addresses: addresses)
    return lambda **given: CudaGraphExecutor(CPU, **given)


def test_where_pytorch_counts_against_a_limit_pools_are_plain(executor, monkeypatch, capsys):
    """It counts the same memory once for every recording."""
    announce_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    assert all(isinstance(executor().new_memory(), PlainMemory) for _ in range(2))
    assert capsys.readouterr().out.count("the process has set a memory limit in PyTorch") == 1


def test_without_addresses_further_pools_are_plain(executor, device, capsys):
    made = executor()
    one, other = (made.new_memory() for _ in range(2))
    assert isinstance(one, Arena) and one._addresses.first != other._addresses.first
    device.fails = "reserve"
    assert [type(made.new_memory()) for _ in range(3)] == [PlainMemory] * 3
    assert capsys.readouterr().out.count("further graphs have their memory in PyTorch's pools") == 1
    device.fails = None


def test_without_arenas_pools_are_plain_and_nothing_leaves(executor):
    made = executor(arenas=False, releasable=True)
    assert isinstance(made.new_memory(), PlainMemory)
    assert made.release_memory() == 0 and not made.memory_away and made.home() is None


def test_without_room_for_all_nothing_returns(executor, device):
    made = executor(releasable=True)
    memories = [made.new_memory() for _ in range(3)]
    for memory in memories:
        allocate(memory.begin()._addresses, 80)
    made.release_memory()
    free, device.free_bytes = device.free_bytes, 200
    for _ in range(2):
        with pytest.raises(executor_module.NoDeviceMemory):
            made.restore_memory()
        assert made.memory_away and not device.mapped and device.free_bytes == 200
    device.free_bytes = free
    made.restore_memory()
    assert [memory.nbytes for memory in memories] == [80] * 3


def test_memory_that_left_in_part_returns(executor, device):
    made = executor(releasable=True)
    memories = [made.new_memory() for _ in range(2)]
    for memory in memories:
        allocate(memory.begin()._addresses, 80)
    releases = iter((None, "unmap"))
    for each in (memory._addresses for memory in memories):
        release = each.release
        each.release = lambda release=release: (setattr(device, "fails", next(releases, None)), release())[1]
    with pytest.raises(executor_module.DeviceMemoryError):
        made.release_memory()
    device.fails = None
    assert made.memory_away
    made.restore_memory()
    assert not made.memory_away and [memory.nbytes for memory in memories] == [80] * 2
