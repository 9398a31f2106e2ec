"""Tensors that a loop gives other memory (`parameter.data = ...`): their values return to addresses of their own.

A copy of a model's weights on the device takes a millisecond, recordings at other addresses take a second.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..announce import LOGGER
from .releasable_pools import Pool, ReleasablePools, allocating, releasable_pools
from .virtual_memory import DeviceMemoryError

# Of a tensor that shares its memory with none: itself, and the object that is asked.
ALONE = 2


class Memory(Protocol):
    """Memory that can leave the device and return to its addresses, with any content.

    Attributes:
        device: The device.
    """

    device: torch.device

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

    Attributes:
        device: The same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: ReleasablePools | None = None
        self._pool: Pool | None = None

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See `Memory`."""
        if self._pools is None:
            self._pools = releasable_pools(self.device, self)
            if self._pools is None:
                raise DeviceMemoryError("memory cannot leave and return here")
            self._pool = self._pools.new_pool()
        assert self._pool is not None
        self.wait()
        torch.cuda.empty_cache()  # PyTorch itself empties no cache for a pool
        # PyTorch keeps blocks by stream. Any will do: memory leaves behind all of the device's work.
        stream = torch.cuda.default_stream(self.device)
        with allocating(), torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool.held, self.device):
            return [_in_larger_storage(tensor) for tensor in like]

    def release(self) -> int:
        """See `Memory`."""
        return 0 if self._pools is None else self._pools.release()

    def restore(self) -> None:
        """See `Memory`."""
        if self._pools is not None:
            self._pools.restore()

    def wait(self) -> None:
        """See `Memory`."""
        torch.cuda.synchronize(self.device)


class ReturningTensors:
    """Tensors with addresses of their own, to which their values return whenever they were given other memory.

    Args:
        memory: What has the addresses.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        # By the tensor's identity, with the tensor, so that no other takes it.
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}
        self._away = False

    def settle(self, moved: Sequence[Tensor]) -> None:
        """Give tensors memory at their own addresses, with the values that they have.

        Nothing happens where one of them is off the device, shares its memory or is no plain tensor, where somebody
        still holds what is at its addresses, or where there is too little memory for a second copy of them.

        Args:
            moved: Tensors that lie elsewhere than before.
        """
        if not moved or not all(map(self._can_be_moved, moved)):
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._bring(moved)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            LOGGER.info("weights do not return to the addresses that graphs have recorded: %s", error)

    def _bring(self, moved: Sequence[Tensor]) -> None:
        if self._away:
            self._memory.restore()
            self._away = False
        homeless = [tensor for tensor in moved if self._home(tensor) is None]
        for tensor, home in zip(homeless, self._memory.make(homeless) if homeless else (), strict=True):
            self._homes[id(tensor)] = tensor, home
        homes = [self._homes[id(tensor)][1].copy_(tensor) for tensor in moved]
        self._memory.wait()  # what they had is freed, perhaps on another stream than copies ran on
        for tensor, home in zip(moved, homes, strict=True):
            tensor.data = home

    def _home(self, tensor: Tensor) -> Tensor | None:
        _, home = self._homes.get(id(tensor), (tensor, None))
        if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
            return None
        return home if home.untyped_storage().nbytes() >= home.nbytes else None  # freed by `resize_(0)`

    def _can_be_moved(self, tensor: Tensor) -> bool:
        """Whether nobody else sees that a tensor gets other memory, nor what is written there."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == self._memory.device
        home = self._home(tensor)
        return plain and tensor.is_contiguous() and _is_alone(tensor) and (home is None or _is_alone(home))

    def release(self) -> int:
        """Take the addresses' memory off the device unless some tensor is there; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        if self._away or not self._homes or not all(_is_alone(home) for _, home in self._homes.values()):
            return 0
        self._away = True
        return self._memory.release()


def _in_larger_storage(like: Tensor) -> Tensor:
    """Return a new tensor like another one; loops free by `resize_(0)` what has a storage of just its own size."""
    storage = torch.empty(like.numel() + 1, dtype=like.dtype, device=like.device).untyped_storage()
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, 0, like.shape, like.stride())


def _is_alone(tensor: Tensor) -> bool:
    held: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return held == ALONE
