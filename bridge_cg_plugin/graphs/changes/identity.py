"""Objects known by their identity, without keeping them."""

from weakref import ref

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class Identity:
    """An object's identity, and whether the object is still there.

    Of a tensor its storage is followed: `torch.utils.swap_tensors` refuses tensors with weak references.
    """

    def __init__(self, value: Tensor | nn.Module) -> None:
        self.number = id(value)
        storage = storage_of(value) if isinstance(value, Tensor) else None
        self._reference = ref(value) if storage is None else storage

    def is_gone(self) -> bool:
        """Whether the object is no longer there, so that another one may take its identity."""
        if isinstance(self._reference, StorageWeakRef):
            expired: bool = self._reference.expired()
            return expired
        return self._reference() is None

    def is_of(self, value: object) -> bool:
        """Whether this is the identity of an object."""
        return id(value) == self.number and not self.is_gone()


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return what stands for a tensor's storage and keeps no memory; None for a tensor that has others inside."""
    return StorageWeakRef(tensor.untyped_storage()) if type(tensor) in (Tensor, nn.Parameter) else None
