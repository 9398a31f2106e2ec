"""What recordings of one slot take memory from: an arena, where all of them begin at the same address.

One microbatch is in a slot at a time, so its recordings need no memory of their own, whatever the order of their
captures. PyTorch finds memory by address over all pools: nothing that it knows may live on in an arena after a capture.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from .ranges import AddressRange

# Entered around the making of tensors.
Making = Callable[[], AbstractContextManager[None]]
# Blocks that something has; others are PyTorch's to give again, or wait for the device.
ALIVE = "active_allocated"


class Pool(Protocol):
    """What one recording takes memory from.

    Attributes:
        handle: PyTorch's; None where nothing is captured.
    """

    handle: Any

    def taking(self) -> AbstractContextManager[None]:
        """Be around captures in the pool."""

    def outlasting(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that may outlast the capture of its recording."""

    def settle(self) -> int:
        """Note that the recording is made; returns how many bytes of the slot's memory it needs.

        Raises:
            CaptureError: Something that the capture made lives on in memory that other recordings use.
        """


class SlotMemory(Protocol):
    """Memory of one slot's recordings.

    Attributes:
        nbytes: Device memory in bytes.
        shrinks: Whether the largest recording's memory goes with it, though others are left.
    """

    shrinks: bool

    @property
    def nbytes(self) -> int:
        """See above."""

    def begin(self) -> Pool:
        """Return what the next recording takes memory from."""

    def keep(self, nbytes: int) -> None:
        """Give memory back that recordings which need no more than `nbytes` do without; no replay is under way."""


class NoMemory:
    """Where recordings are no graphs. See `Pool` and `SlotMemory`."""

    handle, nbytes, shrinks = None, 0, True

    def begin(self) -> "NoMemory":
        """See `SlotMemory`."""
        return self

    def keep(self, nbytes: int) -> None:
        """See `SlotMemory`."""

    def taking(self) -> AbstractContextManager[None]:
        """See `Pool`."""
        return nullcontext()

    def outlasting(self, tensor: Tensor) -> Tensor:
        """See `Pool`."""
        return tensor

    def settle(self) -> int:
        """See `Pool`."""
        return 0


class PlainMemory(NoMemory):
    """One pool of PyTorch's for all recordings: blocks of smaller ones are too small for larger ones that come later.

    See `Pool` and `SlotMemory`.
    """

    shrinks = False

    def __init__(self) -> None:
        self._pool = torch.cuda.MemPool()

    @property
    def handle(self) -> tuple[int, int]:  # type: ignore[override]
        """See `Pool`."""
        return self._pool.id

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """See `SlotMemory`."""
        return sum(segment["total_size"] for segment in _segments(self.handle))

    def keep(self, nbytes: int) -> None:
        """See `SlotMemory`: all goes or nothing."""
        if not nbytes:
            self._pool = torch.cuda.MemPool()

    def settle(self) -> int:
        """See `Pool`."""
        return self.nbytes


class ArenaPool:
    """The memory of one recording in an arena. See `Pool`."""

    def __init__(self, arena: "Arena", addresses: AddressRange) -> None:
        # A recording outlives its slot for a moment, and neither is to wait for a collection.
        self._arena = weakref.ref(arena)
        self._addresses, self._pool = addresses, addresses.new_pool()
        self.handle = self._pool.id

    def taking(self) -> AbstractContextManager[None]:
        """See `Pool`."""
        return self._addresses.giving()

    def outlasting(self, tensor: Tensor) -> Tensor:
        """See `Pool`."""
        return _outside(tensor) if tensor.numel() and self._addresses.holds(tensor) else tensor

    def settle(self) -> int:
        """See `Pool`."""
        arena = self._arena()
        if alive := self.alive():
            if arena is not None:
                arena.abandon()
            raise CaptureError(
                f"the capture made {', '.join(map(_named, alive))}, which is kept, but recordings of other sizes "
                "use the same memory"
            )
        if arena is not None:
            arena.settled(self)
        return self._addresses.taken

    def alive(self) -> list[tuple[int, int]]:
        """Return address and size of the blocks that something has."""
        if found := self._alive():
            gc.collect()  # none ran meanwhile
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            found = self._alive()
        return found

    def _alive(self) -> list[tuple[int, int]]:
        blocks = [block for segment in _segments(self.handle) for block in segment["blocks"]]
        return [(block["address"], block["size"]) for block in blocks if block["state"] == ALIVE]


def _segments(handle: tuple[int, int]) -> list[dict[str, Any]]:
    """Return what PyTorch has in a pool.

    PyTorch 2.11 gives a reference away to each number of a pool that it is asked for: those above 256 die of it.
    """
    return [
        each for each in torch.cuda.memory_snapshot(include_traces=False) if tuple(each["segment_pool_id"]) == handle
    ]


def _named(block: tuple[int, int]) -> str:
    """Return in words the tensor that has a block."""
    address, size = block
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.is_cuda:
            with suppress(RuntimeError):  # of one without a storage
                if address <= each.data_ptr() < address + size:
                    return f"a tensor {list(each.shape)} of {each.dtype}"
    return f"{size} bytes"


class Arena:
    """Addresses of one slot's recordings, each from the beginning. See `SlotMemory`.

    Args:
        new_range: Returns addresses for all that a slot may need.
    """

    shrinks = True

    def __init__(self, new_range: Callable[[], AddressRange]) -> None:
        self._new_range = new_range
        self._addresses: AddressRange | None = new_range()
        self._unsettled: ArenaPool | None = None
        # What earlier recordings still use.
        self._abandoned: weakref.WeakSet[AddressRange] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """See `SlotMemory`."""
        there = [] if self._addresses is None else [self._addresses]
        return sum(each.nbytes for each in (*there, *self._abandoned))

    def begin(self) -> ArenaPool:
        """See `SlotMemory`. What a failed capture made may live on, in its error's frames."""
        if self._unsettled is not None and self._unsettled.alive():
            self.abandon()
        if self._addresses is None:
            self._addresses = self._new_range()
        self._addresses.begin()
        self._unsettled = ArenaPool(self, self._addresses)
        return self._unsettled

    def settled(self, pool: ArenaPool) -> None:
        """Note that nothing lives on of a recording."""
        if pool is self._unsettled:
            self._unsettled = None

    def abandon(self) -> None:
        """Use other addresses from now on: PyTorch would mistake what lives on here for what comes next."""
        if self._addresses is not None:
            self._abandoned.add(self._addresses)
        self._addresses = self._unsettled = None

    def keep(self, nbytes: int) -> None:
        """See `SlotMemory`."""
        if self._addresses is not None:
            self._addresses.keep(nbytes)


class StaticMemory:
    """Memory of tensors that recordings read and write; its content comes back with it.

    Args:
        addresses: What it is behind, for nothing else.
    """

    def __init__(self, addresses: AddressRange) -> None:
        self._addresses, self._pool = addresses, addresses.new_pool()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make tensors inside."""
        with self._addresses.giving(), torch.cuda.use_mem_pool(self._pool):
            yield


def _outside(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that PyTorch neither frees nor finds by its address."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.itemsize
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())


def outlasting(pool: Pool, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return tensors over the same memory that may outlast the capture."""
    return tuple(None if tensor is None else pool.outlasting(tensor) for tensor in tensors)
