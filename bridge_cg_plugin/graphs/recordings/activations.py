"""What the engine asks of an object that keeps a region's activations between its forward and its backward."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor


class Activations(Protocol):
    """Decides where the tensors are that autograd saves in one recording; what is not overridden leaves them there."""

    @property
    def copies(self) -> bool:
        """Whether any are copied to the host and back."""
        return False

    def saving(self, fixed: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Be entered around the forward.

        Args:
            fixed: Tensors over memory that outlives the forward: parameters, buffers, static inputs.
        """

    def restoring(self) -> AbstractContextManager[None]:
        """Be entered around the backward."""
        return nullcontext()

    def join(self) -> None:
        """Let the current stream wait for the copies of a forward or backward that ended; a capture needs it."""
        return

    def forget(self) -> None:
        """Drop what is left of a forward whose backward will not come."""
        return


# Address of a storage that came back -> the address at which it was saved. Autograd calls a backward in a thread of its
# own, so a context variable would not do.
_moved: dict[int, int] | None = None


@contextmanager
def returned_storages() -> Iterator[dict[int, int]]:
    """Let saved tensors come back at other addresses inside; yields where to note them."""
    global _moved
    before, _moved = _moved, {}
    try:
        yield _moved
    finally:
        _moved = before


def saved_address(tensor: Tensor) -> int:
    """Return the address at which a tensor that autograd saved lay in the forward; that of others is their own."""
    address = tensor.data_ptr()
    if not _moved:
        return address
    start = tensor.untyped_storage().data_ptr()
    return _moved.get(start, start) + address - start
