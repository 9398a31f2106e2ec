"""Memory of graphs that leaves the device and returns to the same addresses."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from bridge_cg_plugin.graphs.memory import releasable_pools as pools_module
from bridge_cg_plugin.graphs.memory import virtual_memory
from bridge_cg_plugin.graphs.memory.releasable_memory import ReleasableMemory
from bridge_cg_plugin.graphs.memory.releasable_pools import ReleasablePools, allocating, releasable_pools, tidy_orphans
from bridge_cg_plugin.graphs.memory.virtual_memory import DeviceMemoryError, NoDeviceMemory
from bridge_cg_plugin.graphs.recordings import executor as executor_module

from ..fake_device import FakeVirtualMemory

CAPACITY, ARENA = 400, 128


class Memory(RuleBasedStateMachine):
    """Allocations, departures and returns in any order, beside other users of the device."""

    addresses = Bundle("addresses")

    def __init__(self):
        super().__init__()
        self.device = FakeVirtualMemory(CAPACITY)
        self.memory = ReleasableMemory(self.device, ARENA)
        self.others = 0
        self.kept: dict[int, bytes] = {}
        self.alive: dict[int, int] = {}

    @property
    def missing(self):
        return {address: size for address, size in self.alive.items() if not self.device.has_memory(address)}

    @rule(target=addresses, nbytes=st.integers(1, 150), kept=st.booleans(), seed=st.integers(0, 255))
    def allocate(self, nbytes, kept, seed):
        free, size = self.device.free_bytes, -(-nbytes // 8) * 8
        try:
            address = self.memory.allocate(nbytes, kept)
        except NoDeviceMemory:
            assert free < size and self.device.free_bytes == free
            return 0
        assert self.device.free_bytes == free - size
        assert all(address + size <= other or other + self.alive[other] <= address for other in self.alive)
        self.alive[address] = size
        if kept:
            self.kept[address] = bytes([seed]) * size
            self.device.write(address, torch.full((size,), seed, dtype=torch.uint8))
        return address

    @rule(address=consumes(addresses))
    def give_back(self, address):
        self.alive.pop(address, None)
        self.kept.pop(address, None)
        self.memory.keep(set(self.alive))

    @rule()
    def release(self):
        there = self.device.mapped_bytes
        assert self.memory.release() == there
        assert self.device.free_bytes == CAPACITY - self.others

    @rule()
    def restore(self):
        before, there, missing = dict(self.device.mapped), self.memory.nbytes, self.missing
        fits = sum(missing.values()) <= self.device.free_bytes
        try:
            self.memory.restore()
            assert fits and not self.missing
            assert self.memory.nbytes == there + sum(missing.values())
        except NoDeviceMemory:
            assert not fits and self.memory.away and self.device.mapped == before

    @rule()
    def shrink(self):
        there = {address: size for address, size in self.alive.items() if address not in self.missing}
        before, room = self.contents(there), self.device.free_bytes >= ARENA
        self.memory.shrink()
        assert self.contents(there) == before
        assert self.memory.nbytes == sum(there.values()) or not room

    def contents(self, ranges):
        return {address: self.device.content(address, size) for address, size in ranges.items()}

    @rule(nbytes=st.integers(1, CAPACITY))
    def others_take(self, nbytes):
        taken = min(nbytes, self.device.free_bytes)
        self.others, self.device.free_bytes = self.others + taken, self.device.free_bytes - taken

    @precondition(lambda self: self.others)
    @rule()
    def others_give(self):
        self.others, self.device.free_bytes = 0, self.device.free_bytes + self.others

    @invariant()
    def addresses_stay(self):
        assert self.memory.addresses == set(self.alive)

    @invariant()
    def no_addresses_are_reserved_for_nothing(self):
        for first, size in self.device.reserved.items():
            assert any(first <= address < first + size for address in self.alive)

    @invariant()
    def every_byte_is_counted(self):
        there = self.memory.nbytes
        assert there == self.device.mapped_bytes == CAPACITY - self.others - self.device.free_bytes
        assert there >= sum(self.alive.values()) - sum(self.missing.values())

    @invariant()
    def no_memory_is_behind_addresses_without_use(self):
        for first, handle in self.device.mapped.items():
            assert any(first <= address < first + self.device.sizes[handle] for address in self.alive)

    @invariant()
    def away_where_something_left(self):
        assert self.memory.away == bool(self.missing)

    @invariant()
    def kept_content_is_there(self):
        for address, content in self.kept.items():
            if address not in self.missing:
                assert self.device.content(address, len(content)) == content

    def teardown(self):
        self.memory.keep(())
        assert not (self.device.reserved or self.device.mapped or self.device.sizes)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("call", ["create", "map"])
def test_a_failed_allocation_leaves_nothing(call):
    device = FakeVirtualMemory()
    device.fails = call
    with pytest.raises(DeviceMemoryError, match=call):
        ReleasableMemory(device).allocate(8)
    assert not (device.reserved or device.mapped or device.sizes)


def test_content_that_could_not_be_written_is_written_by_the_next_return():
    device = FakeVirtualMemory()
    memory = ReleasableMemory(device)
    address = memory.allocate(8, kept=True)
    device.write(address, torch.tensor(list(b"contents"), dtype=torch.uint8))
    memory.release()
    device.fails = "write"
    with pytest.raises(DeviceMemoryError, match="write"):
        memory.restore()
    assert memory.away and not device.mapped
    device.fails = None
    memory.restore()
    assert device.content(address, 8) == b"contents"


def test_neighbours_return_in_one_block_an_arena():
    device = FakeVirtualMemory()
    memory = ReleasableMemory(device, 64)
    found = [memory.allocate(16) for _ in range(6)]
    assert len(device.mapped) == 6
    memory.release()
    memory.restore()
    assert sorted(device.mapped) == [found[0], found[4]] and memory.nbytes == 96
    memory.keep(set(found) - {found[1]})
    assert memory.nbytes == 96
    memory.release()
    memory.restore()
    assert sorted(device.mapped) == [found[0], found[2], found[4]] and memory.nbytes == 80


@pytest.fixture
def half_dead():
    """Return a device and memory of 48 bytes in one block, of which 16 in the middle and 8 at the end have no use."""
    device = FakeVirtualMemory(200)
    memory = ReleasableMemory(device, 64)
    found = [memory.allocate(16, kept=number != 2) for number in range(3)]
    end = memory.allocate(8)
    memory.release()
    memory.restore()
    for number, address in enumerate(found):
        device.write(address, torch.full((16,), number + 1, dtype=torch.uint8))
    memory.keep({found[0], found[2]})
    assert (len(device.mapped), memory.nbytes, memory.unused_bytes) == (1, 56, 24) and end not in memory.addresses
    return device, memory, found


def there(device, found):
    return [device.content(found[number], 16) == bytes([number + 1]) * 16 for number in (0, 2)] == [True, True]


@pytest.mark.parametrize("call", ["create", "reserve", "map", "copy", "unmap"])
@pytest.mark.parametrize("number", range(4))
def test_a_block_stays_as_it_is_where_a_call_of_its_division_fails(half_dead, monkeypatch, caplog, call, number):
    device, memory, found = half_dead
    before, works, calls = (dict(device.mapped), dict(device.reserved), device.free_bytes), getattr(device, call), []

    def fails_once(*args):
        calls.append(call)
        if len(calls) == number + 1:
            raise DeviceMemoryError("made to fail")
        return works(*args)

    monkeypatch.setattr(device, call, fails_once)
    with caplog.at_level("INFO"):
        memory.shrink()
    failed = bool(caplog.records)
    assert failed == (len(calls) > number) and there(device, found)
    if failed and call != "unmap":
        assert (device.mapped, device.reserved, device.free_bytes) == before
    monkeypatch.undo()
    memory.shrink()
    assert there(device, found) and not memory.away and memory.nbytes == 32


def settings_of_pytorch():
    return torch._C._cuda_memorySnapshot((0, 0, False))["allocator_settings"]


@pytest.fixture
def allocator_settings():
    change = torch._C._accelerator_setAllocatorSettings
    before = settings_of_pytorch()["PYTORCH_CUDA_ALLOC_CONF"]
    yield change
    change("expandable_segments:False,release_lock_on_cudamalloc:False")
    change(before)


@pytest.mark.parametrize("written", ["", "max_split_size_mb:512,expandable_segments:True", "expandable_segments:False"])
@pytest.mark.parametrize("fails", [False, True])
def test_pytorchs_settings_are_as_before_once_memory_was_made(allocator_settings, written, fails):
    allocator_settings("expandable_segments:True,release_lock_on_cudamalloc:False")
    allocator_settings(written)
    before = settings_of_pytorch()
    try:
        with allocating():
            inside = settings_of_pytorch()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert inside["release_lock_on_cudamalloc"] and not inside["expandable_segments"]
    assert inside["max_split_size"] == before["max_split_size"]
    assert settings_of_pytorch() == before


class Owner:
    """What captures in pools."""


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(pools_module, "_made", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    segments = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": address} for address in segments])
    return segments


def called_by_pytorch(pools):
    """Return what PyTorch calls for memory, as a function of C."""
    address = ctypes.cast(pools._allocate, ctypes.c_void_p).value
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(address)
    return lambda nbytes: function(nbytes, 0, None)


def test_pytorch_gets_memory_from_a_function_of_python_and_no_address_where_there_is_none(made, caplog):
    device, owner = FakeVirtualMemory(64), Owner()
    pools = ReleasablePools(torch.device("cuda", 0), owner, device)
    take = called_by_pytorch(pools)
    address = take(60)
    assert device.mapped_bytes == 64 and address in device.mapped
    assert take(1) is None and not caplog.records
    device.free_bytes, device.fails = 64, "map"
    assert take(1) is None and "memory of graphs could not be made" in caplog.text


def test_memory_goes_back_once_pytorch_has_given_it_back(made):
    device, owner = FakeVirtualMemory(), Owner()
    pools = ReleasablePools(torch.device("cuda", 0), owner, device)
    take = called_by_pytorch(pools)
    made[:] = [take(8), take(16), 7]
    pools.tidy()
    assert len(device.mapped) == 2
    del made[0]
    assert pools.release() == 16 and not device.mapped
    pools.restore()
    assert list(device.mapped) == [made[0]]
    del owner, made[:]
    tidy_orphans()
    assert not device.reserved and not pools_module._made


def test_an_executor_takes_memory_of_dropped_recordings_out_of_blocks(made, monkeypatch):
    device, found = FakeVirtualMemory(), []

    def new_pools(gpu, owner):
        found.append(ReleasablePools(gpu, owner, device))
        return found[0]

    monkeypatch.setattr(executor_module, "releasable_pools", new_pools)
    monkeypatch.setattr(executor_module, "_recording_stream", lambda *unused: "stream")
    monkeypatch.setattr(ReleasablePools, "new_pool", lambda self: "pool")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    executor = executor_module.CudaGraphExecutor(torch.device("cuda", 0), releasable=True)
    (pools,) = found
    take = called_by_pytorch(pools)
    made[:] = [take(8), take(16), take(24)]
    for ask, left in ((executor.tidy, 24), (executor.new_pool, 8)):
        pools.release()
        pools.restore()
        assert len(device.mapped) == 1
        del made[-1]
        ask()
        assert device.mapped_bytes == left


def test_pools_of_a_living_owner_are_left_alone_by_those_who_look_for_orphans(made):
    device, owner = FakeVirtualMemory(), Owner()
    pools = ReleasablePools(torch.device("cuda", 0), owner, device)
    called_by_pytorch(pools)(8)
    tidy_orphans()
    assert len(device.reserved) == 1 and pools_module._made == [pools]


def test_the_cache_is_emptied_for_memory_that_does_not_fit(made, monkeypatch):
    device, owner = FakeVirtualMemory(64), Owner()
    pools = ReleasablePools(torch.device("cuda", 0), owner, device)
    made.append(called_by_pytorch(pools)(64))
    pools.release()
    device.free_bytes = 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(device, "free_bytes", 64))
    pools.restore()
    assert not pools.memory.away


def test_without_a_driver_a_line_says_so_and_nothing_else_happens(made, capsys, monkeypatch):
    def no_driver(device):
        raise OSError("libcuda.so.1: not there")

    monkeypatch.setattr(pools_module, "CudaVirtualMemory", no_driver)
    assert releasable_pools(torch.device("cuda", 0), Owner()) is None
    assert capsys.readouterr().out == (
        "[bridge-cg] memory of graphs stays on the device between training steps: OSError: libcuda.so.1: not there\n"
    )
    assert pools_module._made == []


def test_the_function_that_gives_memory_back_is_one_of_c_without_an_effect():
    function = getattr(ctypes.CDLL(None), pools_module.GIVE_BACK)
    function.restype, function.argtypes = ctypes.c_long, [ctypes.c_void_p]
    assert function(1 << 46) == 1 << 46


class FakeDriver:
    """What `libcuda.so.1` is, as far as its calls and their order go; `fails` names one that does, with a status."""

    def __init__(self):
        self.calls, self.fails = [], {}

    def __getattr__(self, name):
        def call(*arguments):
            values = [getattr(argument, "value", argument) for argument in arguments]
            self.calls.append((name, *(value for value in values if isinstance(value, int))))
            first = getattr(arguments[0], "_obj", None)
            if name == "cuMemGetAllocationGranularity":
                first.value = 2 << 20
            elif name in ("cuMemAddressReserve", "cuMemCreate"):
                first.value = 0x7F00_0000_0000 if name == "cuMemAddressReserve" else 77
            elif name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_A_TEST"
            return self.fails.get(name, 0)

        return call


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()
    monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name: made)
    return made


def test_cudas_calls_get_their_arguments_in_order(driver):
    memory = virtual_memory.CudaVirtualMemory(3)
    size = memory.granularity
    assert memory._properties.location.id == memory._access.location.id == 3
    del driver.calls[:]
    address = memory.reserve(size)
    handle = memory.create(size)
    memory.map(address, size, handle)
    memory.unmap(address, size)
    memory.destroy(handle)
    memory.free(address, size)
    assert driver.calls == [
        ("cuMemAddressReserve", size, 0, 0, 0),
        ("cuMemCreate", size, 0),
        ("cuMemMap", address, size, 0, handle, 0),
        ("cuMemSetAccess", address, size, 1),
        ("cuMemUnmap", address, size),
        ("cuMemRelease", handle),
        ("cuMemAddressFree", address, size),
    ]


def test_cudas_errors_are_named_and_too_little_memory_is_told_apart(driver):
    memory = virtual_memory.CudaVirtualMemory(0)
    driver.fails = {"cuMemCreate": 2}
    with pytest.raises(NoDeviceMemory, match="cuMemCreate: CUDA_ERROR_OF_A_TEST"):
        memory.create(8)
    driver.fails = {"cuMemSetAccess": 1}
    with pytest.raises(DeviceMemoryError, match="cuMemSetAccess") as found:
        memory.map(16, 8, 77)
    assert not isinstance(found.value, NoDeviceMemory) and ("cuMemUnmap", 16, 8) in driver.calls


def test_structures_lie_as_cuda_h_lays_them_out():
    properties = virtual_memory._Properties
    places = [getattr(properties, name).offset for name in ("type", "handle_types", "location", "win32", "flags")]
    assert places == [0, 4, 8, 16, 24] and ctypes.sizeof(properties) == 32
    assert ctypes.sizeof(virtual_memory._Access) == 12


def test_content_is_copied_from_and_to_where_the_host_keeps_it(driver):
    memory = virtual_memory.CudaVirtualMemory(0)
    content = torch.arange(8, dtype=torch.uint8)
    del driver.calls[:]
    memory.read(16, content)
    memory.write(16, content)
    memory.copy(32, 16, 8)
    place = content.data_ptr()
    # A copy from pageable memory may go on after its call, and streams of PyTorch's do not wait for it.
    waits = ("cuStreamSynchronize", 0)
    to_host, to_device = ("cuMemcpyDtoH_v2", place, 16, 8), ("cuMemcpyHtoD_v2", 16, place, 8)
    assert driver.calls == [to_host, to_device, waits, ("cuMemcpyDtoD_v2", 32, 16, 8), waits]


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_host_keeps_content_in_pageable_memory_where_it_has_no_page_locked_left(
    driver, monkeypatch, caplog, default, fails
):
    asked = []

    def new_tensor(*sizes, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        if pin_memory and fails:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(*sizes, **kwargs)

    monkeypatch.setattr(virtual_memory, "torch", SimpleNamespace(empty=new_tensor, uint8=torch.uint8))
    with torch.device(default), caplog.at_level("INFO"):
        found = virtual_memory.CudaVirtualMemory(0).host_memory(24)
    assert (found.device.type, found.dtype, found.nbytes) == ("cpu", torch.uint8, 24)
    assert asked == ([True, False] if fails else [True])
    assert ("CUDA error: out of memory" in caplog.text) == fails
