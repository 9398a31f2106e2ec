"""Ranges of addresses over a device's virtual memory, by the allocator that PyTorch calls."""

import ctypes
import gc
import subprocess

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bridge_cg_plugin.graphs.memory import ranges
from bridge_cg_plugin.graphs.memory.ranges import AddressRange, NoDeviceMemory, close_left, driver_of

from ..fake_device import FakeVirtualMemory

CAPACITY, ADDRESSES, PAGE = 400, 304, 8


def functions():
    library = ranges.library()
    library.bridge_cg_allocate.restype = ctypes.c_void_p
    library.bridge_cg_allocate.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    library.bridge_cg_give_back.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return library


def allocate(addresses, nbytes):
    """Ask for memory as PyTorch does; returns its address, None without memory."""
    functions().bridge_cg_use(addresses._range)
    try:
        return functions().bridge_cg_allocate(nbytes, 0, None)
    finally:
        functions().bridge_cg_use(None)


def give_back(address):
    functions().bridge_cg_give_back(address, 0, 0, None)


class Range(RuleBasedStateMachine):
    """Recordings, departures and returns in any order, beside other users of the device."""

    def __init__(self):
        super().__init__()
        self.device = FakeVirtualMemory(CAPACITY)
        self.keeps = None
        self.others = self.most = self.begun = 0

    @precondition(lambda self: self.keeps is None)
    @rule(keeps=st.booleans())
    def make(self, keeps):
        self.keeps, self.addresses = keeps, AddressRange(self.device, ADDRESSES, keeps)

    @precondition(lambda self: self.keeps is not None and not self.addresses.away)
    @rule(sizes=st.lists(st.integers(1, 90), max_size=5))
    def record(self, sizes):
        """What a recording takes begins at the first address, whatever the others took."""
        self.addresses.begin()
        end = 0
        for nbytes in sizes:
            size, mapped = -(-nbytes // PAGE) * PAGE, self.addresses.nbytes
            fits = end + size <= ADDRESSES and end + size - mapped <= self.device.free_bytes
            fits = fits or end + size <= mapped
            address = allocate(self.addresses, nbytes)
            assert (address is not None) == fits
            if not fits:
                break
            assert address == self.addresses.first + end
            give_back(address)
            end += size
        assert self.addresses.taken == end
        self.most = max(self.most, end)
        assert self.addresses.nbytes == self.most

    @precondition(lambda self: self.keeps is not None and not self.addresses.away)
    @rule(nbytes=st.integers(0, ADDRESSES))
    def keep(self, nbytes):
        """Whole pieces go, as they were taken."""
        before = self.addresses.nbytes
        self.addresses.keep(nbytes)
        assert min(before, nbytes) <= self.addresses.nbytes <= before
        if not nbytes:
            assert not self.addresses.nbytes
        self.most = self.addresses.nbytes

    @precondition(lambda self: self.keeps is not None)
    @rule(seed=st.integers(0, 255))
    def release(self, seed):
        there = self.addresses.nbytes
        if there and self.keeps:
            self.content = bytes([seed]) * there
            for first, handle in self.device.mapped.items():
                self.device.contents[handle][:] = bytes([seed]) * self.device.sizes[handle]
                assert first >= self.addresses.first
        assert self.addresses.release() == there
        assert not self.device.mapped

    @precondition(lambda self: self.keeps is not None)
    @rule()
    def restore(self):
        fits = self.most <= self.device.free_bytes or not self.addresses.away
        try:
            was_away = self.addresses.away
            self.addresses.restore()
            assert fits and not self.addresses.away and self.addresses.nbytes == self.most
            if was_away and self.keeps:
                assert self.device.content(self.addresses.first, self.most) == self.content
        except NoDeviceMemory:
            assert not fits and self.addresses.away and not self.device.mapped

    @rule(nbytes=st.integers(1, CAPACITY))
    def others_take(self, nbytes):
        taken = min(nbytes, self.device.free_bytes)
        self.others, self.device.free_bytes = self.others + taken, self.device.free_bytes - taken

    @rule()
    def others_give(self):
        self.others, self.device.free_bytes = 0, self.device.free_bytes + self.others

    @invariant()
    def every_byte_is_counted(self):
        assert self.device.mapped_bytes == CAPACITY - self.others - self.device.free_bytes
        if self.keeps is not None:
            assert self.addresses.nbytes == self.device.mapped_bytes

    def teardown(self):
        if self.keeps is not None:
            del self.addresses
            close_left()
        assert not self.device.mapped and not self.device.reserved


TestRange = Range.TestCase
TestRange.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_memory_that_pytorch_has_stays_until_it_gives_it_back():
    """Tensors may outlast what made them."""
    device = FakeVirtualMemory(CAPACITY)
    addresses = AddressRange(device, ADDRESSES)
    first, second = allocate(addresses, 16), allocate(addresses, 24)
    del addresses
    gc.collect()
    for segment in (second, first):
        close_left()
        assert device.mapped_bytes == 40
        give_back(segment)
    close_left()
    assert not device.mapped and not device.reserved


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_a_driver_that_fails_leaves_nothing_behind(call):
    device = FakeVirtualMemory(CAPACITY)
    addresses = AddressRange(device, ADDRESSES)
    allocate(addresses, 16)
    device.fails = call
    assert allocate(addresses, 64) is None and addresses.nbytes == 16
    device.fails = None
    assert allocate(addresses, 64) == addresses.first + 16
    assert device.mapped_bytes == 80 == CAPACITY - device.free_bytes


@pytest.fixture
def gpu(monkeypatch):
    driver_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield torch.device("cuda", 0)
    driver_of.cache_clear()


UNFIT = {
    "no memory": lambda patch, device: patch.setattr(device, "free_bytes", 0),
    "_no_such_function": lambda patch, device: patch.setattr(ranges, "PYTORCHS", ("_no_such_function",)),
    "another content": lambda patch, device: patch.setattr(device, "read", lambda address, content: content.zero_()),
}


@pytest.mark.parametrize("why", UNFIT)
def test_what_the_driver_or_pytorch_cannot_do_is_said_once(gpu, monkeypatch, capsys, why):
    device = FakeVirtualMemory(CAPACITY)
    monkeypatch.setattr(ranges, "VirtualMemory", lambda index: device)
    UNFIT[why](monkeypatch, device)
    assert driver_of(gpu) is None and driver_of(gpu) is None
    said = capsys.readouterr().out
    assert said.count("graphs keep their memory in PyTorch's pools") == 1 and why in said


def test_a_driver_is_tried_out_once(gpu, monkeypatch):
    device = FakeVirtualMemory(CAPACITY)
    monkeypatch.setattr(ranges, "VirtualMemory", lambda index: device)
    assert driver_of(gpu) is driver_of(gpu) is device
    close_left()
    assert not device.mapped and not device.reserved


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_compiler_pools_are_pytorchs(gpu, monkeypatch, tmp_path, capsys, compiler):
    ranges.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    try:
        assert driver_of(gpu) is None
        assert "PyTorch's pools" in capsys.readouterr().out
    finally:
        ranges.library.cache_clear()


def test_the_allocator_is_compiled_once(monkeypatch, tmp_path):
    compile_, runs = subprocess.run, []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: (runs.append(args), compile_(*args, **kwargs))[1])
    try:
        for _ in range(2):
            ranges.library.cache_clear()
            assert ranges.library()
    finally:
        ranges.library.cache_clear()
    assert len(runs) == 1 and len(list((tmp_path / "bridge-cg-plugin").iterdir())) == 1
