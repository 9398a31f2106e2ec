"""Addresses for tensors that a loop gives other memory, in memory that leaves the device without them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .ranges import AddressRange, driver_of, taking_from
from .returning_storages import uses_of
from .virtual_memory import DeviceMemoryError

# What has two copies at a time.
GROUP_BYTES = 4 * 2**30


class Memory(Protocol):
    """Memory that can leave the device and return to its addresses, with any content."""

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors like these, once.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
            DeviceMemoryError: The driver failed.
        """

    def release(self) -> int:
        """Take all of it off the device; returns how many bytes left, 0 where nothing of it was there.

        Raises:
            DeviceMemoryError: The driver failed.
        """

    def restore(self) -> None:
        """Take back what is not there.

        Raises:
            DeviceMemoryError: There is not enough, or the driver failed.
        """

    def wait(self) -> None:
        """Wait for the device."""


class RangeMemory:
    """Memory of PyTorch's tensors on a GPU, behind addresses of their own.

    Args:
        device: The GPU.

    Raises:
        DeviceMemoryError: Memory cannot leave and return there.
    """

    def __init__(self, device: torch.device) -> None:
        if (driver := driver_of(device)) is None:
            raise DeviceMemoryError("memory cannot leave and return here")
        self._device, self._driver = device, driver
        self._addresses: AddressRange | None = None

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See `Memory`."""
        self.wait()
        torch.cuda.empty_cache()  # PyTorch itself empties no cache for a pool
        total = torch.cuda.get_device_properties(self._device).total_memory
        addresses = AddressRange(self._driver, total)
        try:
            # Nobody keeps the pool, so that PyTorch gives back what is no tensor's any more.
            with taking_from(addresses, addresses.new_pool()):
                made = [in_larger_storage(tensor) for tensor in like]
        except torch.OutOfMemoryError:
            addresses.keep(0)
            raise
        self._addresses = addresses
        self.wait()  # deterministic algorithms fill new memory, on another stream than the caller's
        return made

    def release(self) -> int:
        """See `Memory`."""
        return 0 if self._addresses is None else self._addresses.release()

    def restore(self) -> None:
        """See `Memory`."""
        if self._addresses is not None and self._addresses.away:
            self.wait()
            torch.cuda.empty_cache()
            self._addresses.restore()

    def wait(self) -> None:
        """See `Memory`."""
        torch.cuda.synchronize(self._device)


class Group:
    """Addresses of tensors that are given their memory together.

    Args:
        new_memory: Makes what has the addresses, of no other group.
        tensors: The tensors.

    Attributes:
        tensors: See above.
    """

    def __init__(self, new_memory: Callable[[], Memory], tensors: Sequence[Tensor]) -> None:
        self._new_memory, self.tensors = new_memory, tuple(tensors)
        self._memory: Memory | None = None
        self._homes: tuple[Tensor, ...] = ()

    def fits(self) -> bool:
        """Whether the tensors are as large as they were, and all of them or nobody holds what is at the addresses."""
        if not all(_fits(*pair) for pair in self._pairs()):
            return False
        return all(_is_at(*pair) for pair in self._pairs()) or all(map(is_alone, self._homes))

    def addresses(self) -> set[int]:
        """Return the addresses that a tensor may have."""
        return {home.data_ptr() for home in self._homes if not _is_empty(home)}

    def bring(self) -> None:
        """Give the tensors, which are elsewhere, memory here, with their values.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
            DeviceMemoryError: There is not enough memory, or the driver failed.
        """
        if self._memory is None:
            memory = self._new_memory()
            self._homes, self._memory = tuple(memory.make(self.tensors)), memory
        else:
            self._memory.restore()
        _copy(self.tensors, self._homes)
        self._memory.wait()  # what they had is freed, perhaps on another stream than copies ran on
        for tensor, home in self._pairs():
            tensor.data = home

    def release(self) -> int:
        """See `ReturningTensors.release`."""
        used = not all(is_alone(home) or _is_empty(home) for home in self._homes)
        return 0 if self._memory is None or used else self._memory.release()

    def leave(self) -> None:
        """Give tensors that are here memory of PyTorch's.

        Raises:
            torch.OutOfMemoryError: There is not enough for all of them.
        """
        for tensor, home in self._pairs():
            if not _is_empty(home) and _is_at(tensor, home):
                tensor.data = tensor.data.clone()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each tensor with its memory here; nothing before they were given any."""
        return zip(self.tensors, self._homes, strict=bool(self._homes))


def groups_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours, as many as have `GROUP_BYTES`, and one at least."""
    group: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if group and nbytes + tensor.nbytes > GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(tensor)
        nbytes += tensor.nbytes
    yield group


def _copy(tensors: Sequence[Tensor], homes: Sequence[Tensor]) -> None:
    """Copy tensors, those of one type by a few kernels: one for each of hundreds would keep the host busy."""
    for dtype in {tensor.dtype for tensor in tensors}:
        of_type = [[each for each in many if each.dtype == dtype] for many in (homes, tensors)]
        torch._foreach_copy_(of_type[0], of_type[1])


def in_larger_storage(like: Tensor) -> Tensor:
    """Return a new tensor like another one; loops free by `resize_(0)` what has a storage of just its own size."""
    storage = torch.empty(like.numel() + 1, dtype=like.dtype, device=like.device).untyped_storage()
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, 0, like.shape, like.stride())


def _is_at(tensor: Tensor, home: Tensor) -> bool:
    return tensor.data_ptr() == home.data_ptr()


def _fits(tensor: Tensor, home: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (home.shape, home.dtype) and not _is_empty(home)


def _is_empty(tensor: Tensor) -> bool:
    """Whether a tensor's storage was freed by `resize_(0)`."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors have a tensor's storage, and how many objects of Python have the object for that."""
    storage = tensor.untyped_storage()
    return uses_of(storage), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else has a tensor's memory; what PyTorch does not own cannot be resized."""
    return _holders(tensor) == _ALONE and tensor.untyped_storage().resizable()
