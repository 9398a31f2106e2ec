"""Tensors that a loop gives other memory (`parameter.data = ...`): their values return to addresses of their own.

A copy of a model's weights on the device takes a millisecond, recordings at other addresses take a second.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ...announce import LOGGER
from .releasable_pools import allocating_in, releasable_pools
from .virtual_memory import DeviceMemoryError


class Memory(Protocol):
    """Memory that can leave the device and return to its addresses, with any content."""

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors like these.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
            DeviceMemoryError: The driver failed.
        """

    def release(self) -> int:
        """Take all of it off the device; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """

    def restore(self) -> None:
        """Take it back.

        Raises:
            DeviceMemoryError: There is not enough, or the driver failed.
        """

    def wait(self) -> None:
        """Wait for the device."""


class PooledMemory:
    """Memory of pools on a GPU.

    Args:
        device: The GPU.

    Raises:
        DeviceMemoryError: Memory cannot leave and return there.
    """

    def __init__(self, device: torch.device) -> None:
        pools = releasable_pools(device, self)
        if pools is None:
            raise DeviceMemoryError("memory cannot leave and return here")
        self._device, self._pools, self._pool = device, pools, pools.new_pool()

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See `Memory`."""
        self.wait()
        torch.cuda.empty_cache()  # PyTorch itself empties no cache for a pool
        with allocating_in(self._pool, self._device):
            return [_in_larger_storage(tensor) for tensor in like]

    def release(self) -> int:
        """See `Memory`."""
        return self._pools.release()

    def restore(self) -> None:
        """See `Memory`."""
        self._pools.restore()

    def wait(self) -> None:
        """See `Memory`."""
        torch.cuda.synchronize(self._device)


class _Homes:
    """Addresses of tensors that were given other memory together.

    Args:
        memory: What has the addresses; of no other homes.
        tensors: The tensors.

    Raises:
        torch.OutOfMemoryError: There is not enough memory.
        DeviceMemoryError: The driver failed.
    """

    def __init__(self, memory: Memory, tensors: Sequence[Tensor]) -> None:
        self._memory, self._tensors = memory, tuple(tensors)
        self._homes = memory.make(tensors)
        self._away = False

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, as large as they were, and nobody holds what is at the addresses."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and all(map(_fits, tensors, self._homes)) and all(map(_is_alone, self._homes))

    def have(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all of these are here already: recordings of another state of the model were made elsewhere."""
        here = {home.data_ptr() for home in self._homes if not _is_empty(home)}
        return all(tensor.data_ptr() in here for tensor in tensors)

    def bring(self) -> None:
        """Give the tensors, which are elsewhere, memory here, with their values.

        Raises:
            DeviceMemoryError: There is not enough memory, or the driver failed.
        """
        if self._away:
            self._memory.restore()
            self._away = False
        _copy(self._tensors, self._homes)
        self._memory.wait()  # what they had is freed, perhaps on another stream than copies ran on
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            tensor.data = home

    def release(self) -> int:
        """See `ReturningTensors.release`."""
        if self._away or not all(_is_alone(home) or _is_empty(home) for home in self._homes):
            return 0
        self._away = True
        return self._memory.release()

    def leave(self) -> None:
        """Give tensors that are here memory of PyTorch's.

        Raises:
            torch.OutOfMemoryError: There is not enough for all of them.
        """
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            if not _is_empty(home) and tensor.data_ptr() == home.data_ptr():
                tensor.data = tensor.data.clone()


class ReturningTensors:
    """Tensors with addresses of their own, to which their values return whenever they were given other memory.

    Args:
        new_memory: Makes what has the addresses, on a device.
        device: The device.
    """

    def __init__(self, device: torch.device, new_memory: Callable[[torch.device], Memory] = PooledMemory) -> None:
        self._device, self._new_memory = device, new_memory
        self._homes: _Homes | None = None

    def settle(self, moved: Sequence[Tensor]) -> None:
        """Give tensors memory at their own addresses, with the values that they have.

        Nothing happens where one of them is off the device, shares its memory or is no plain tensor, or where there is
        too little memory for a second copy of them. Where they are not those of last time, or somebody holds what is at
        the addresses, they get others.

        Args:
            moved: Tensors that lie elsewhere than before.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._settle(moved)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            LOGGER.info("weights do not return to the addresses that graphs have recorded: %s", error)
            self._release_unused()

    def _settle(self, moved: Sequence[Tensor]) -> None:
        if not moved or (self._homes is not None and self._homes.have(moved)):
            return
        if self._homes is not None and not self._homes.fit(moved):
            self._homes = None  # its memory goes back once nobody is there
        if not all(map(self._can_be_moved, moved)):
            return
        if self._homes is None:
            self._homes = _Homes(self._new_memory(self._device), moved)
        self._homes.bring()

    def _can_be_moved(self, tensor: Tensor) -> bool:
        """Whether nobody else sees that a tensor gets other memory."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == self._device
        return plain and tensor.is_contiguous() and _is_alone(tensor)

    def release(self) -> int:
        """Take the addresses' memory off the device unless some tensor is there; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return 0 if self._homes is None else self._homes.release()

    def _release_unused(self) -> None:
        try:
            self.release()
        except DeviceMemoryError as error:
            LOGGER.info("memory for weights stays on the device: %s", error)

    def stop(self) -> None:
        """Give tensors that are at their addresses memory of PyTorch's, if there is room."""
        if self._homes is None:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._homes.leave()
        except torch.OutOfMemoryError as error:
            LOGGER.info("weights stay where graphs read them: %s", error)
        self._release_unused()
        self._homes = None


def _copy(tensors: Sequence[Tensor], homes: Sequence[Tensor]) -> None:
    """Copy tensors, those of one type by a few kernels: one for each of hundreds would keep the host busy."""
    for dtype in {tensor.dtype for tensor in tensors}:
        of_type = [[each for each in many if each.dtype == dtype] for many in (homes, tensors)]
        torch._foreach_copy_(of_type[0], of_type[1])


def _in_larger_storage(like: Tensor) -> Tensor:
    """Return a new tensor like another one; loops free by `resize_(0)` what has a storage of just its own size."""
    storage = torch.empty(like.numel() + 1, dtype=like.dtype, device=like.device).untyped_storage()
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, 0, like.shape, like.stride())


def _fits(tensor: Tensor, home: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (home.shape, home.dtype) and not _is_empty(home)


def _is_empty(tensor: Tensor) -> bool:
    """Whether a tensor's storage was freed by `resize_(0)`."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors have a tensor's storage, and how many objects of Python have the object for that."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))


def _is_alone(tensor: Tensor) -> bool:
    """Whether nobody else has a tensor's memory; what PyTorch does not own cannot be resized."""
    return _holders(tensor) == _ALONE and tensor.untyped_storage().resizable()
