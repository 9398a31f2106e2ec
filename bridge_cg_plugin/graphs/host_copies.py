"""Host copies of small integer device tensors, which save a synchronization."""

from collections import OrderedDict

import torch
from torch import Tensor

Key = tuple[object, ...]


class ByStorage[Copy]:
    """Keeps something for device tensors, found again through the storage they share with any view of them.

    Args:
        capacity: How many tensors are kept; older ones are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The storage is kept alive with its entry, so its address cannot name another tensor's memory.
        self._known: OrderedDict[Key, tuple[torch.UntypedStorage, int, Copy]] = OrderedDict()

    def store(self, tensor: Tensor, copy: Copy) -> None:
        """Keep something for a contiguous tensor of a device."""
        if on_host(tensor) or not tensor.is_contiguous():
            return
        self._known[_key(tensor)] = (tensor.untyped_storage(), version_of(tensor), copy)
        self._known.move_to_end(_key(tensor))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def forget(self, tensor: Tensor) -> None:
        """Keep nothing for a tensor any more."""
        self._known.pop(_key(tensor), None)

    def find(self, tensor: Tensor) -> Copy | None:
        """Return what is kept for a tensor that was not written to since."""
        entry = self._known.get(_key(tensor)) if tensor.is_contiguous() else None
        return entry[2] if entry is not None and entry[1] == version_of(tensor) else None


class HostCopies(ByStorage[tuple[int, ...]]):
    """Remembers host copies of device tensors, found again through the storage they share with any view of them.

    Sizes that a batch is made of are on the host before they are copied to the device; whoever makes that copy calls
    `remember`. A tensor that nobody announced is read once and remembered, so only a first sight of it makes the host
    wait.

    Args:
        capacity: How many tensors are kept; older ones are forgotten.

    Attributes:
        device_reads: How many tensors had to be read from the device.
    """

    def __init__(self, capacity: int = 256) -> None:
        super().__init__(capacity)
        self.device_reads = 0

    def remember(self, device: Tensor, host: Tensor) -> None:
        """Note that `device` holds what `host`, of as many elements, holds."""
        self.store(device, as_integers(host))

    def values(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a tensor's elements, row by row. A leading part of a remembered tensor is known with it."""
        known = as_integers(tensor) if on_host(tensor) else self._leading(tensor)
        if known is not None:
            return known
        self.device_reads += 1
        values = as_integers(tensor.cpu())
        self.store(tensor, values)
        return values

    def known(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Return a tensor's elements as `values` does, None where the device would have to be read."""
        return as_integers(tensor) if on_host(tensor) else self._leading(tensor)

    def _leading(self, tensor: Tensor) -> tuple[int, ...] | None:
        values = self.find(tensor)
        return values[: tensor.numel()] if values is not None and tensor.numel() <= len(values) else None


class HostTensors(ByStorage[Tensor]):
    """Remembers host copies of device tensors as tensors, for those of many elements."""

    def __init__(self) -> None:
        super().__init__(capacity=64)

    def remember(self, device: Tensor, host: Tensor) -> None:
        """Note that `device` holds what `host`, of the same shape, holds now; `host` may change later."""
        self.store(device, host.clone())

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return a host tensor of the same shape and elements; None where the device would have to be read.

        Nobody may write to it.
        """
        if on_host(tensor):
            return tensor
        host = self.find(tensor)
        return host.view(tensor.shape) if host is not None and host.numel() == tensor.numel() else None


def on_host(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for no device."""
    return tensor.device.type == "cpu"


def _key(tensor: Tensor) -> Key:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with every write to a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def as_integers(host: Tensor) -> tuple[int, ...]:
    """Return a host tensor's elements, row by row."""
    return tuple(map(int, host.reshape(-1).tolist()))


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device, without waiting for what the device is computing."""
    if device.type == "cpu":
        return host
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
