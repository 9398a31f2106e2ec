"""What the host knows of small device tensors of whole numbers without asking the device."""

from collections import OrderedDict

import torch
from torch import Tensor

Key = tuple[object, ...]


class HostCopies:
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
        self._capacity = capacity
        # The storage is kept alive with its entry, so its address cannot name another tensor's memory.
        self._known: OrderedDict[Key, tuple[torch.UntypedStorage, int, tuple[int, ...]]] = OrderedDict()
        self.device_reads = 0

    def remember(self, device: Tensor, host: Tensor) -> None:
        """Note that `device` holds what `host`, of as many elements, holds."""
        self._store(device, as_integers(host))

    def values(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a tensor's elements, row by row. A leading part of a remembered tensor is known with it."""
        known = self.known(tensor)
        if known is not None:
            return known
        self.device_reads += 1
        values = as_integers(tensor.cpu())
        self._store(tensor, values)
        return values

    def known(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Return a tensor's elements as `values` does, None where the device would have to be read."""
        if tensor.device.type == "cpu":
            return as_integers(tensor)
        entry = self._known.get(_key(tensor)) if tensor.is_contiguous() else None
        if entry is not None and entry[1] == _version(tensor) and tensor.numel() <= len(entry[2]):
            return entry[2][: tensor.numel()]
        return None

    def _store(self, tensor: Tensor, values: tuple[int, ...]) -> None:
        if tensor.device.type == "cpu" or not tensor.is_contiguous():
            return
        self._known[_key(tensor)] = (tensor.untyped_storage(), _version(tensor), values)
        self._known.move_to_end(_key(tensor))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


def _key(tensor: Tensor) -> Key:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def as_integers(host: Tensor) -> tuple[int, ...]:
    """Return a host tensor's elements, row by row."""
    return tuple(map(int, host.reshape(-1).tolist()))
