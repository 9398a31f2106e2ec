"""Ranges of device addresses: memory comes and goes behind them, so what recorded an address stays valid.

By CUDA's driver; `allocator.c` lets PyTorch take memory from a range.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ...announce import LOGGER, announce

# Values of cuda.h.
SUCCESS, OUT_OF_MEMORY = 0, 2
# Of a piece of memory at most: pieces go one by one.
PIECE_BYTES = 256 << 20
PINNED, ON_DEVICE, READ_AND_WRITE, MINIMUM_GRANULARITY = 1, 1, 3, 0


class DeviceMemoryError(RuntimeError):
    """A call of the driver failed; the message names the call and the error."""


class NoDeviceMemory(DeviceMemoryError):
    """The device has too little free memory."""


_ADDRESS, _SIZE, _POINTER = ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p
CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_ADDRESS), _SIZE, _POINTER, _ADDRESS)
MAP = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
ALLOW = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE, _POINTER, _SIZE)
UNMAP = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE)
RELEASE = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)


class DriverTable(ctypes.Structure):
    """`struct driver` of allocator.c: functions, what they are called with, and sizes."""

    _fields_ = (
        ("create", CREATE),
        ("map", MAP),
        ("allow", ALLOW),
        ("unmap", UNMAP),
        ("release", RELEASE),
        ("properties", _POINTER),
        ("access", _POINTER),
        ("page", _SIZE),
        ("most", _SIZE),
    )


_LOCATION = ("location_type", ctypes.c_int), ("location_id", ctypes.c_int)


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        *_LOCATION,
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (*_LOCATION, ("flags", ctypes.c_int))


class VirtualMemory:
    """Addresses of one GPU, and memory that is put behind them. Sizes and addresses are multiples of `granularity`.

    Args:
        device: Index of the GPU. Its context is current in every thread that calls.

    Attributes:
        granularity: In bytes.
        table: What makes memory and puts it behind addresses.

    Raises:
        OSError: There is no driver.
        DeviceMemoryError: The GPU has no virtual memory.
    """

    def __init__(self, device: int) -> None:
        # Calls let other threads of Python run: the driver may wait for one of them.
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = {"location_type": ON_DEVICE, "location_id": device}
        self._properties = _Properties(type=PINNED, **location)
        self._access = _Access(**location, flags=READ_AND_WRITE)
        found = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(found),
            ctypes.byref(self._properties),
            ctypes.c_int(MINIMUM_GRANULARITY),
        )
        self.granularity = found.value
        names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
        kinds = (CREATE, MAP, ALLOW, UNMAP, RELEASE)
        functions = (kind((name, self._driver)) for kind, name in zip(kinds, names, strict=True))
        given = map(ctypes.addressof, (self._properties, self._access))
        self.table = DriverTable(*functions, *given, self.granularity, PIECE_BYTES)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == SUCCESS:
            return
        raise (NoDeviceMemory if status == OUT_OF_MEMORY else DeviceMemoryError)(f"{name}: {self.name_of(status)}")

    def name_of(self, status: int) -> str:
        """Return the name of an error."""
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or str(status).encode()).decode()

    def reserve(self, nbytes: int) -> int:
        """Return the first of `nbytes` addresses that nothing else gets until `free`."""
        address = ctypes.c_uint64()
        rest = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), *rest)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back; no memory is behind them."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def host_memory(self, nbytes: int) -> Tensor:
        """Return `[nbytes]` uint8 memory of the host, fast to copy to and from the device if there is such.

        Raises:
            DeviceMemoryError: There is none.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            LOGGER.info("the host keeps %d bytes of graphs in pageable memory, which is slower: %s", nbytes, error)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise DeviceMemoryError(f"the host has no memory for what graphs read: {error}") from error

    def wait(self) -> None:
        """Wait for all work of the device."""
        self._call("cuCtxSynchronize")

    def read(self, address: int, content: Tensor) -> None:
        """Copy device memory to the host, as much as `content` holds."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(content.data_ptr()), begin, size)

    def write(self, address: int, content: Tensor) -> None:
        """Copy `content` to device memory; the copy has ended on return."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyHtoD_v2", begin, ctypes.c_void_p(content.data_ptr()), size)
        # From pageable memory, the call may return before the copy has ended, for which PyTorch's streams do not wait.
        self._call("cuStreamSynchronize", ctypes.c_uint64(0))


SOURCE = Path(__file__).with_name("allocator.c")
COMPILERS = ("cc", "gcc", "clang")
# What pools of ranges, and tensors that outlast them, need of PyTorch.
PYTORCHS = ("_cuda_customAllocator", "_construct_storage_from_data_pointer")
# One of a pool's two numbers is always 0: a look at this one reads PyTorch's settings and no blocks.
NO_POOL = (1, 1)
# PyTorch gets memory from one range at a time.
_ONE_AT_A_TIME = RLock()
_giving: "list[_Range | None]" = [None]


class _Range(ctypes.Structure):
    """`struct range` of allocator.c."""

    _fields_ = (
        ("driver", ctypes.POINTER(DriverTable)),
        ("first", ctypes.c_ulonglong),
        *((name, ctypes.c_size_t) for name in ("size", "cursor", "mapped", "segments")),
        ("pieces", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("room", ctypes.c_size_t),
        ("next", ctypes.c_void_p),
    )


# Ranges that nobody has any more, and what made their memory.
_left: list[tuple[VirtualMemory, _Range]] = []
_closing = Lock()


@functools.cache
def library() -> ctypes.CDLL:
    """Return allocator.c, compiled once on this machine.

    Raises:
        OSError: There is no compiler, or no folder for what it makes.
        subprocess.CalledProcessError: It failed.
    """
    content = SOURCE.read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bridge-cg-plugin"
    made = folder / f"allocator-{platform.machine()}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:  # ranks may compile at once
            compiled = Path(aside) / made.name
            compiler = shlex.split(os.environ.get("CC", "")) or list(filter(None, map(shutil.which, COMPILERS)))[:1]
            if not compiler:
                raise OSError(f"no compiler: none of {', '.join(COMPILERS)}")
            flags = ["-O2", "-shared", "-fPIC", "-pthread"]
            subprocess.run([*compiler, *flags, "-o", compiled, SOURCE], check=True, capture_output=True)
            compiled.replace(made)
    loaded = ctypes.CDLL(str(made))
    for name, *given in (("use",), ("add",), ("remove",), ("grow", ctypes.c_size_t), ("shrink", ctypes.c_size_t)):
        getattr(loaded, f"bridge_cg_{name}").argtypes = (ctypes.POINTER(_Range), *given)
    return loaded


class AddressRange:
    """Addresses with memory behind the first of them, as much as was taken.

    Args:
        driver: Makes addresses and memory.
        nbytes: How many addresses.
        keeps: Whether content comes back with memory that left.

    Attributes:
        away: Whether its memory has left the device.
    """

    def __init__(self, driver: VirtualMemory, nbytes: int, keeps: bool = False) -> None:
        self._driver, self._keeps, self._library = driver, keeps, library()
        size = -(-nbytes // driver.granularity) * driver.granularity
        first = driver.reserve(size)
        self._range = _Range(driver=ctypes.pointer(driver.table), first=first, size=size)
        self._library.bridge_cg_add(self._range)
        self.away, self._left_bytes = False, 0
        self._content: Tensor | None = None
        weakref.finalize(self, _left.append, (driver, self._range)).atexit = False

    @property
    def first(self) -> int:
        """The first address."""
        return int(self._range.first)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return int(self._range.mapped)

    @property
    def is_used(self) -> bool:
        """Whether PyTorch has segments here, with tensors or in its cache."""
        return bool(self._range.segments)

    @property
    def taken(self) -> int:
        """What was taken since `begin`, in bytes."""
        return int(self._range.cursor)

    def begin(self) -> None:
        """Let what is taken next lie at the beginning, over what was taken before."""
        self._range.cursor = 0

    def grow(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes`, where there is none.

        Raises:
            NoDeviceMemory: There is not enough.
            DeviceMemoryError: The driver failed, or there are fewer addresses.
        """
        self._check(self._library.bridge_cg_grow(self._range, nbytes))

    def keep(self, nbytes: int) -> None:
        """Give whole pieces of device memory back that lie behind the first `nbytes`.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        if nbytes < self.nbytes:
            self._driver.wait()
            self._shrink(nbytes)

    def release(self) -> int:
        """Take the memory off the device; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        left = self.nbytes
        if self.away or not left:
            return 0
        self._driver.wait()
        if self._keeps:
            if self._content is None or len(self._content) < left:
                self._content = self._driver.host_memory(left)
            self._driver.read(self.first, self._content[:left])
        self._left_bytes, self.away = left, True
        self._shrink(0)
        return left

    def restore(self) -> None:
        """Put memory behind the addresses again; without `keeps`, it holds anything.

        Raises:
            NoDeviceMemory: There is not enough.
            DeviceMemoryError: The driver failed.
        """
        if not self.away:
            return
        self.grow(self._left_bytes)
        if self._content is not None:
            self._driver.write(self.first, self._content[: self._left_bytes])
        self.away = False

    def _shrink(self, nbytes: int) -> None:
        self._check(self._library.bridge_cg_shrink(self._range, nbytes))

    def _check(self, status: int) -> None:
        if status:
            error = NoDeviceMemory if status in (OUT_OF_MEMORY, -1) else DeviceMemoryError
            raise error(f"memory of graphs: {self._driver.name_of(status)}" if status > 0 else "no addresses left")

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Let pools of `new_pool` take memory from here."""
        with _ONE_AT_A_TIME, own_segments():
            _giving.append(self._range)
            self._library.bridge_cg_use(self._range)
            try:
                yield
            finally:
                _giving.pop()
                self._library.bridge_cg_use(_giving[-1])

    def new_pool(self) -> torch.cuda.MemPool:
        """Return a pool for what runs inside `giving`; an allocator knows its addresses, where two pools would meet."""
        allocate, give_back = map(_address, (self._library.bridge_cg_allocate, self._library.bridge_cg_give_back))
        return torch.cuda.MemPool(torch._C._cuda_customAllocator(allocate, give_back))

    def holds(self, memory: Tensor | UntypedStorage) -> bool:
        """Whether a tensor or a storage lies here."""
        return bool(self.first <= memory.data_ptr() < self.first + self._range.size)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@contextmanager
def own_segments() -> Iterator[None]:
    """Let PyTorch take memory of pools in segments of their own, which expandable segments are not."""
    found = torch._C._cuda_memorySnapshot((*NO_POOL, False))["allocator_settings"]
    if not found["expandable_segments"]:
        yield
        return
    change, written = torch._C._accelerator_setAllocatorSettings, found["PYTORCH_CUDA_ALLOC_CONF"]
    # Of what is not written, some settings go back to their defaults and others stay.
    change(_with(written, expandable_segments=False))
    try:
        yield
    finally:
        change(_with(written, expandable_segments=True))
        change(written)


def _with(written: str, **settings: bool) -> str:
    return ",".join(filter(None, (written, *(f"{name}:{value}" for name, value in settings.items()))))


def close_left() -> None:
    """Give memory and addresses back of ranges that nobody has, as far as PyTorch has given theirs back."""
    with _closing:
        closed = [each for each in _left if not each[1].segments]
        for each in closed:
            _left.remove(each)
    for driver, found in closed:
        library().bridge_cg_remove(found)
        with suppress(DeviceMemoryError):
            driver.wait()
            if not library().bridge_cg_shrink(found, 0):
                driver.free(found.first, found.size)


@functools.cache
def driver_of(device: torch.device) -> VirtualMemory | None:
    """Return what makes memory of ranges on a GPU; None, with a line that says why, where there is no such."""
    try:
        torch.cuda.synchronize(device)  # which starts the driver
        library()
        made = VirtualMemory(device.index)
        _try_out(made)
        return made
    except Exception as error:
        why = getattr(error, "stderr", b"") or b""
        said = why.decode(errors="replace").strip().partition("\n")[0] or error
        announce(f"graphs keep their memory in PyTorch's pools, those of larger buckets beside smaller ones: {said}")
        return None


def _try_out(driver: VirtualMemory) -> None:
    """Let a little memory leave and return, so that what cannot work fails before graphs depend on it.

    Raises:
        DeviceMemoryError: The driver failed, or content did not come back.
    """
    tried = AddressRange(driver, driver.granularity, keeps=True)
    tried.grow(driver.granularity)
    sent = torch.arange(driver.granularity, dtype=torch.int64).to(torch.uint8)
    driver.write(tried.first, sent)
    tried.release()
    tried.restore()
    found = torch.empty_like(sent)
    driver.read(tried.first, found)
    if not torch.equal(found, sent):
        raise DeviceMemoryError("memory that left the device returned with another content")
    for name in PYTORCHS:
        getattr(torch._C, name)
    with tried.giving():
        pass
