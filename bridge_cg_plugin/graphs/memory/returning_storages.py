"""Storages that a loop frees and fills again: their memory returns to the addresses that graphs have recorded."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from ...announce import warn
from .ranges import AddressRange, driver_of, taking_from
from .virtual_memory import DeviceMemoryError, NoDeviceMemory

# PyTorch's `resize_`, called with a storage and a number of bytes.
Resize = Callable[[UntypedStorage, int], UntypedStorage]
# A smaller storage of a single tensor shares a segment with others of PyTorch's. Its tensor can be given other memory;
# tensors that share a storage, as those of data parallelism's buffers, cannot.
LEAST_BYTES = 20 * 2**20
# What PyTorch takes at least for a pool's segment.
SEGMENT_BYTES = 20 * 2**20


class Place(Protocol):
    """Addresses for one storage."""

    def freed(self) -> None:
        """Take the memory off the device; the storage has none any more."""

    def fill(self, storage: UntypedStorage, nbytes: int, resize: Resize) -> None:
        """Give the storage, which has no memory, some of here."""


class ReturningPlace:
    """Addresses of one storage, on one GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, driver_of(device)
        self._addresses: AddressRange | None = None
        self._pool: torch.cuda.MemPool | None = None

    def freed(self) -> None:
        """See `Place`."""
        if self._driver is not None and self._addresses is not None:
            try:
                self._addresses.release()
            except DeviceMemoryError as error:
                self._give_up(error)

    def fill(self, storage: UntypedStorage, nbytes: int, resize: Resize) -> None:
        """See `Place`. Without room here, the storage gets memory as PyTorch gives it, or PyTorch's error."""
        if not self._there(nbytes):
            resize(storage, nbytes)
            return
        assert self._addresses is not None and self._pool is not None
        try:
            with taking_from(self._addresses, self._pool):
                resize(storage, nbytes)
        except torch.OutOfMemoryError:
            resize(storage, nbytes)

    def _there(self, nbytes: int) -> bool:
        """Return the memory to the addresses; whether it is there."""
        if self._driver is None:
            return False
        if self._addresses is None:  # PyTorch itself empties no cache for a pool
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        try:
            if self._addresses is None:
                self._addresses = AddressRange(self._driver, nbytes + SEGMENT_BYTES)
                self._pool = self._addresses.new_pool()
            self._addresses.restore()
        except NoDeviceMemory:
            return False
        except DeviceMemoryError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: DeviceMemoryError) -> None:
        warn(f"a buffer's memory does not return to the same addresses any more: {error}")
        self._driver = None


class ReturningStorages:
    """Storages whose memory is to return to the same addresses.

    Args:
        new_place: Makes the addresses of a storage on a device.
    """

    def __init__(self, new_place: Callable[[torch.device], Place] = ReturningPlace) -> None:
        self._new_place = new_place
        self._followed: dict[int, StorageWeakRef] = {}
        # With the number of bytes that each is for.
        self._places: dict[int, tuple[int, Place]] = {}

    def follow(self, storages: Iterable[UntypedStorage]) -> None:
        """Follow storages from now on; once one is freed and filled again, its addresses are its own for good."""
        self.forget_dead()
        for storage in storages:
            large = storage.nbytes() >= LEAST_BYTES
            if storage._cdata not in self._followed and (large or _is_shared(storage)):
                self._followed[storage._cdata] = StorageWeakRef(storage)

    def forget_dead(self) -> None:
        """Give the addresses of storages back that nobody holds any more."""
        for key in [key for key, storage in self._followed.items() if storage.expired()]:
            del self._followed[key]
            self._places.pop(key, None)

    def resize(self, storage: UntypedStorage, nbytes: int, resize: Resize) -> UntypedStorage:
        """Stand in for `resize_` of any storage."""
        key, before = storage._cdata, storage.nbytes()
        if key not in self._followed or (before > 0) == (nbytes > 0):
            # PyTorch moves a storage to other memory even where it has this size already.
            return storage if key in self._followed and before == nbytes else resize(storage, nbytes)
        size, place = self._places.get(key, (0, None))
        if nbytes:
            if place is None or size != nbytes:
                place = self._new_place(storage.device)
                self._places[key] = nbytes, place
            place.fill(storage, nbytes, resize)
        else:
            resize(storage, 0)
            if place is not None:
                place.freed()
        return storage

    def stop(self, resize: Resize) -> None:
        """Follow no storage any more. What is in a place of its own moves to PyTorch's memory, if there is room."""
        self.forget_dead()
        for key in list(self._places):
            storage = UntypedStorage._new_with_weak_ptr(self._followed[key].cdata)
            if storage is not None and storage.nbytes():
                _move(storage, resize)
        self._followed, self._places = {}, {}


def uses_of(storage: UntypedStorage) -> int:
    """Return how many tensors have a storage, and one for the object that Python has of it."""
    return int(torch._C._storage_Use_Count(storage._cdata))


_tensor = torch.empty(1)
_ONE_TENSOR = uses_of(_tensor.untyped_storage())


def _is_shared(storage: UntypedStorage) -> bool:
    """Whether several tensors have a storage, which may have been freed before."""
    return uses_of(storage) > _ONE_TENSOR


def _move(storage: UntypedStorage, resize: Resize) -> None:
    """Free a storage and fill it with its content again; one without room for a copy stays where it is."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    try:
        kept, nbytes = content.clone(), storage.nbytes()
    except torch.OutOfMemoryError:
        return
    resize(storage, 0)
    resize(storage, nbytes)
    content.copy_(kept)
