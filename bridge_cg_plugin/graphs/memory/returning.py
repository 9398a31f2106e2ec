"""Memory of a model that a loop frees and fills again returns to the addresses that recordings read.

Storages of data parallelism are resized to nothing and back, other weights are given other memory
(`parameter.data = ...`), from where they are copied. PyTorch takes memory for either from the beginning of a range, in
the same order each time. The pages leave once nothing is there.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn

from ...announce import LOGGER, warn
from ..errors import release_frames
from .ranges import AddressRange, DeviceMemoryError, driver_of

# PyTorch's `resize_`, called with a storage and a number of bytes.
Resize = Callable[[UntypedStorage, int], UntypedStorage]
# A smaller storage of a single tensor shares a segment with others of PyTorch's. Its tensor can be given other memory;
# tensors that share a storage, as those of data parallelism's buffers, cannot.
LEAST_BYTES = 20 * 2**20
# Weights that have two copies at a time.
GROUP_BYTES = 4 * 2**30
NO_ROOM = (torch.OutOfMemoryError, DeviceMemoryError)


class Home:
    """Addresses of their own for what leaves and returns together: one storage, or the weights of a region.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: AddressRange | None = None
        _homes.add(self)

    def fill(self, storage: UntypedStorage, nbytes: int, resize: Resize) -> None:
        """Give a storage, which has no memory, some from here, or as PyTorch gives it where there is no room."""
        try:
            self.begin()
            with self.taking():
                resize(storage, nbytes)
        except NO_ROOM as error:
            _stay("a buffer does", error)
            resize(storage, nbytes)

    def settle(self, moved: Sequence[Tensor]) -> None:
        """Give weights memory here, with the values that they have, by a copy that takes milliseconds.

        Nothing happens where one is here already: recordings of another state of the model were made elsewhere. Nor
        where one is off the device, shares its memory or is no plain tensor. Without memory for a second copy of some
        `GROUP_BYTES`, those that are left stay elsewhere.

        Args:
            moved: Tensors that lie elsewhere than before.
        """
        if not moved or any(map(self.holds, moved)) or not all(map(self._can_be_moved, moved)):
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._bring(deque(moved))
        except NO_ROOM as error:
            _stay("weights do", error)

    def _can_be_moved(self, tensor: Tensor) -> bool:
        """Whether nobody else has a tensor's memory, which PyTorch owns, or sees that it gets another one."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == self._device and tensor.is_contiguous()
        return plain and _holders(tensor) == _ALONE and tensor.untyped_storage().resizable()

    def _bring(self, left: deque[Tensor]) -> None:
        self.begin()
        while left:
            group = [left.popleft()]
            while left and sum(tensor.nbytes for tensor in (*group, left[0])) <= GROUP_BYTES:
                group.append(left.popleft())
            homes = self.make(group)
            for dtype in {tensor.dtype for tensor in group}:  # a kernel for each tensor would keep the host busy
                there, here = ([each for each in many if each.dtype == dtype] for many in (homes, group))
                torch._foreach_copy_(there, here)
            self.wait()  # what they had is freed, perhaps on another stream than copies ran on
            for tensor, made in zip(group, homes, strict=True):
                tensor.data = made

    def begin(self) -> None:
        """Let what is taken next lie at the first address, or at others while something is there.

        Raises:
            DeviceMemoryError: The memory of last time does not fit, or the driver failed.
        """
        self._empty_cache()
        if self._addresses is None or self._addresses.is_used:
            if (driver := driver_of(self._device)) is None:
                raise DeviceMemoryError("memory cannot leave and return here")
            self._addresses = AddressRange(driver, torch.cuda.get_device_properties(self._device).total_memory)
        self._addresses.restore()
        self._addresses.begin()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let PyTorch take memory from here. Nobody keeps the pool, so what is no tensor's any more is given back.

        PyTorch keeps blocks by stream. Any will do: memory leaves behind all of the device's work.
        """
        assert self._addresses is not None, "nothing has begun"
        stream = torch.cuda.stream(torch.cuda.default_stream(self._device))
        with self._addresses.giving(), stream, torch.cuda.use_mem_pool(self._addresses.new_pool()):
            yield

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors here like others.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
        """
        self._empty_cache()
        with self.taking():
            made = list(map(torch.empty_like, like))
        self.wait()  # deterministic algorithms fill new memory, on another stream than the caller's
        return made

    def holds(self, memory: Tensor | UntypedStorage) -> bool:
        """Whether a tensor or a storage lies here."""
        return self._addresses is not None and self._addresses.holds(memory)

    def release(self) -> int:
        """Take the memory off the device unless something is there; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return 0 if self._addresses is None or self._addresses.is_used else self._addresses.release()

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def _empty_cache(self) -> None:
        """Give memory back that nothing has: PyTorch itself empties no cache for a pool."""
        self.wait()
        torch.cuda.empty_cache()


_homes: "weakref.WeakSet[Home]" = weakref.WeakSet()


def release_homes() -> int:
    """Take memory off the device that weights have left; returns how many bytes left."""
    left = 0
    for home in list(_homes):
        try:
            left += home.release()
        except DeviceMemoryError as error:
            _homes.discard(home)
            warn(f"memory for weights did not leave the device: {error}")
    return left


def _stay(what: str, error: Exception) -> None:
    LOGGER.info("%s not return to the addresses that graphs have recorded: %s", what, error)
    release_frames(error)  # which hold memory that is not needed now, as long as a record is kept
    torch.cuda.empty_cache()
    release_homes()


class ReturningStorages:
    """Storages that return home once they were freed and filled again.

    Args:
        new_home: Makes the addresses of one storage.
    """

    def __init__(self, new_home: Callable[[torch.device], Home] = Home) -> None:
        self._new_home = new_home
        self._homes: weakref.WeakKeyDictionary[UntypedStorage, Home] = weakref.WeakKeyDictionary()

    def follow(self, storages: Iterable[UntypedStorage]) -> None:
        """Follow storages from now on, unless they are too small for addresses of their own."""
        for storage in storages:
            # One of several tensors may have been freed before.
            if storage not in self._homes and (storage.nbytes() >= LEAST_BYTES or _uses_of(storage) > _ALONE[0]):
                self._homes[storage] = self._new_home(storage.device)

    def resize(self, storage: UntypedStorage, nbytes: int, resize: Resize) -> UntypedStorage:
        """Stand in for `resize_` of any storage."""
        home, before = self._homes.get(storage), storage.nbytes()
        if home is None:
            return resize(storage, nbytes)
        # PyTorch moves a storage to other memory even where it has this size already.
        if before != nbytes:
            home.fill(storage, nbytes, resize) if not before else resize(storage, nbytes)
        return storage

    def stop(self) -> None:
        """Follow no storage any more; what is at home stays there until it is freed."""
        self._homes.clear()


def _uses_of(storage: UntypedStorage) -> int:
    """Return how many tensors have a storage, and one for the object that Python has of it."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors have a tensor's storage, and how many objects of Python have the object for that."""
    storage = tensor.untyped_storage()
    return _uses_of(storage), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))
