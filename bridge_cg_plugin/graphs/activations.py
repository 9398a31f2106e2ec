"""What the engine asks of an object that keeps a region's activations between its forward and its backward."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .executor import Executor
    from .recording import RegionBody


class Activations(Protocol):
    """Decides where the tensors are that autograd saves in one recording."""

    def saving(self, fixed: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Be entered around the forward.

        Args:
            fixed: Tensors over memory that outlives the forward: parameters, buffers, static inputs.
        """

    def restoring(self) -> AbstractContextManager[None]:
        """Be entered around the backward."""

    def join(self) -> None:
        """Let the current stream wait for the copies of a forward or backward that ended; a capture needs it."""

    def forget(self) -> None:
        """Drop what is left of a forward whose backward will not come."""


class Offloading(Protocol):
    """Makes a recording's activations once its warm-up is over."""

    def prepare(self, executor: "Executor", body: "RegionBody", slot: int) -> Activations | None:
        """Return what keeps the activations of this work in a slot, or None where they stay in the graph's memory.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """

    def accepts(self, nbytes: int) -> bool:
        """Whether a slot, all buckets recorded, may take so many bytes; if not, `prepare` is asked again for less.

        Raises:
            CaptureError: It takes too much and cannot take less.
        """

    def release(self) -> None:
        """Give back all host memory."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory held, in bytes."""


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
