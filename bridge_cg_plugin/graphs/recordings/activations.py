"""What the engine asks of objects that keep activations between a forward and its backward, and that make these."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .executor import Executor
    from .recording import RegionBody


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

    def forget(self) -> None:
        """Drop what is left of a forward whose backward will not come."""


class Offloading(Protocol):
    """Makes the activations of a region, or of parts that run one after the other and share a slot's memory."""

    def prepare(
        self, executor: "Executor", bodies: "Sequence[RegionBody]", slot: int
    ) -> "Sequence[Activations | None]":
        """Return what keeps each body's activations in a slot, None where they stay in the graph's memory.

        Their warm-up is over.

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
