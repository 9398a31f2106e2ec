"""Memory pools of PyTorch whose memory can leave the device while graphs are captured in them."""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...announce import LOGGER, announce
from ..replays.slot import Making
from .releasable_memory import ReleasableMemory
from .virtual_memory import CudaVirtualMemory, NoDeviceMemory, VirtualMemory

# What PyTorch calls for memory of a pool: bytes, device and stream, for an address.
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
# What PyTorch calls to give memory back: a function of C without an effect. PyTorch holds its allocator's lock there,
# for which a thread that holds Python's may wait, so that no function of Python may run.
GIVE_BACK = "labs"
# PyTorch may call functions of these as long as their memory is there.
_made: list["ReleasablePools"] = []


class Pool(tuple[int, int]):
    """The handle of a pool, which lives as long as this object or a graph that was captured in it."""

    held: torch.cuda.MemPool

    @classmethod
    def over(cls, allocator: Any) -> "Pool":
        """Make a pool over an allocator."""
        held = torch.cuda.MemPool(allocator)
        made = cls(held.id)
        made.held = held
        return made


class ReleasablePools:
    """Pools on one device whose memory leaves and returns together.

    Args:
        device: The device.
        owner: What captures in the pools.
        driver: Makes the memory; None takes CUDA's.

    Attributes:
        memory: What the pools have.

    Raises:
        Exception: This release of PyTorch or the driver cannot do it.
    """

    def __init__(self, device: torch.device, owner: object, driver: VirtualMemory | None = None) -> None:
        torch.cuda.synchronize(device)  # which starts the driver
        self._device, self._owner = device, weakref.ref(owner)
        self.memory = ReleasableMemory(driver or CudaVirtualMemory(device.index))
        self._keeps = False
        self._allocate = ALLOCATE(self._new_memory)
        give_back = getattr(ctypes.CDLL(None), GIVE_BACK)
        self._allocator = torch._C._cuda_customAllocator(_address(self._allocate), _address(give_back))
        _made.append(self)

    def _new_memory(self, nbytes: int, device: int, stream: int | None) -> int:
        """Return the address of new memory for PyTorch, 0 without one, which PyTorch takes for too little memory."""
        try:
            return self.memory.allocate(nbytes, self._keeps)
        except NoDeviceMemory:
            return 0
        except Exception:
            LOGGER.exception("memory of graphs could not be made")
            return 0

    def new_pool(self) -> Pool:
        """Return a pool for captures inside `allocating`; its content is lost when its memory leaves."""
        with torch.cuda.device(self._device):
            return Pool.over(self._allocator)

    def static_memory(self) -> Making:
        """Return what tensors are made in whose content is there again when their memory returns."""
        return partial(self._static, self.new_pool())

    @contextmanager
    def _static(self, pool: Pool) -> Iterator[None]:
        self._keeps = True
        try:
            with allocating(), torch.cuda.use_mem_pool(pool.held, self._device):
                yield
        finally:
            self._keeps = False

    def release(self) -> int:
        """Take the memory of all pools off the device; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        torch.cuda.synchronize(self._device)
        self.tidy()
        return self.memory.release()

    def restore(self) -> None:
        """Take the memory of all pools back, PyTorch's cache emptied for it if need be.

        Raises:
            NoDeviceMemory: There is not enough.
        """
        try:
            self.memory.restore()
        except NoDeviceMemory:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self.tidy()
            self.memory.restore()

    def tidy(self) -> None:
        """Give memory back that PyTorch has given back."""
        used = {segment["address"] for segment in torch.cuda.memory_snapshot()}
        if not self.memory.addresses <= used:
            torch.cuda.synchronize(self._device)
            self.memory.keep(used)

    def shrink(self) -> None:
        """Give memory back that PyTorch has given back, also what is in one block with other memory.

        No other thread works with the pools meanwhile.
        """
        self.tidy()
        if self.memory.unused_bytes:
            torch.cuda.synchronize(self._device)
            self.memory.shrink()

    @property
    def orphaned(self) -> bool:
        """Whether nothing will be captured in the pools any more."""
        return self._owner() is None

    def try_out(self) -> None:
        """Let a little memory leave and return, so that what cannot work fails before graphs depend on it.

        Raises:
            RuntimeError: Its content was not there again.
        """
        with self.static_memory()():
            tensor = torch.full((1,), 1.0, device=self._device)
        if tensor.data_ptr() not in self.memory.addresses:
            raise RuntimeError("PyTorch does not take a pool's memory from its allocator")
        self.release()
        self.restore()
        if tensor.item() != 1.0:
            raise RuntimeError("memory that left the device returned with another content")


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def releasable_pools(device: torch.device, owner: object) -> ReleasablePools | None:
    """Return pools whose memory can leave a device; None, with a logged reason, where there can be none."""
    try:
        pools = ReleasablePools(device, owner)
        pools.try_out()
        return pools
    except Exception as error:
        announce(f"memory of graphs stays on the device between training steps: {type(error).__name__}: {error}")
        return None


def tidy_orphans() -> None:
    """Give the memory of graphs back that went with their model, as far as PyTorch has given it back."""
    for pools in [pools for pools in _made if pools.orphaned]:
        if pools.memory.addresses:
            pools.tidy()
        if not pools.memory.addresses:
            _made.remove(pools)


@contextmanager
def allocating() -> Iterator[None]:
    """Let PyTorch call functions of Python for memory of pools.

    Its allocator then holds no lock meanwhile, for which a thread that holds Python's may wait, and takes memory in
    segments of its own, which expandable segments are not.
    """
    change = torch._C._accelerator_setAllocatorSettings
    found = torch._C._cuda_memorySnapshot((0, 0, False))["allocator_settings"]
    written: str = found["PYTORCH_CUDA_ALLOC_CONF"]
    before = {name: found[name] for name in ("expandable_segments", "release_lock_on_cudamalloc")}
    # Of what is not written, some settings go back to their defaults and others stay.
    change(_with(written, expandable_segments=False, release_lock_on_cudamalloc=True))
    try:
        yield
    finally:
        change(_with(written, **before))
        change(written)


@contextmanager
def allocating_in(pool: Pool, device: torch.device) -> Iterator[None]:
    """Let PyTorch take memory from a pool inside.

    It keeps blocks by stream. Any will do: memory leaves behind all of the device's work.
    """
    stream = torch.cuda.default_stream(device)
    with allocating(), torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool.held, device):
        yield


def _with(written: str, **settings: bool) -> str:
    return ",".join([*filter(None, [written]), *(f"{name}:{value}" for name, value in settings.items())])
