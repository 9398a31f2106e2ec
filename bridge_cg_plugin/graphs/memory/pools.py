"""What recordings of one slot take memory from: an arena, where all of them begin at the same address.

One microbatch is in a slot at a time, so its recordings need no memory of their own, whatever the order of their
captures. PyTorch finds memory by address over all pools: nothing that it knows may live on in an arena after a capture.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from .ranges import AddressRange, own_segments

# Entered around the making of tensors.
Making = Callable[[], AbstractContextManager[None]]
# Blocks that something has; others are PyTorch's to give again, or wait for the device.
ALIVE = "active_allocated"


class Pool:
    """What one recording takes memory from; this one's is no graph."""

    @property
    def handle(self) -> Any:
        """PyTorch's; None where nothing is captured."""
        return None

    def taking(self) -> AbstractContextManager[None]:
        """Be around captures in the pool."""
        return nullcontext()

    def outlasting(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that may outlast the capture of its recording."""
        return tensor

    def settle(self) -> int:
        """Note that the recording is made; returns how many bytes of the slot's memory it needs.

        Raises:
            CaptureError: Something that the capture made lives on in memory that other recordings use.
        """
        return 0


class SlotMemory:
    """Memory of one slot's recordings; of these, which are no graphs, none."""

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return 0

    def begin(self) -> Pool:
        """Return what the next recording takes memory from."""
        return Pool()

    def keep(self, nbytes: int) -> None:
        """Give memory back that recordings which need no more than `nbytes` do without; no replay is under way."""


class PlainMemory(SlotMemory, Pool):
    """One pool of PyTorch's for all recordings: blocks of smaller ones are too small for later, larger ones."""

    def __init__(self) -> None:
        self._pool = torch.cuda.MemPool()

    @property
    def handle(self) -> tuple[int, int]:
        """See `Pool`."""
        return self._pool.id

    @property
    def nbytes(self) -> int:
        """See `SlotMemory`."""
        return sum(segment["total_size"] for segment in _segments(self.handle))

    def taking(self) -> AbstractContextManager[None]:
        """See `Pool`. NCCL registers this memory, and may not where segments expand."""
        return own_segments()

    def begin(self) -> "PlainMemory":
        """See `SlotMemory`. PyTorch captures no more in a pool that all its graphs have left."""
        if not _blocks(self.handle):
            self.keep(0)
            torch.cuda.empty_cache()
        return self

    def keep(self, nbytes: int) -> None:
        """See `SlotMemory`: all goes or nothing."""
        if not nbytes:
            self._pool = torch.cuda.MemPool()

    def settle(self) -> int:
        """See `Pool`."""
        return self.nbytes


class ArenaPool(Pool):
    """The memory of one recording in an arena.

    Args:
        addresses: Where it lies.
        unsettled: The arena's pools in which something may live; this one's handle until it is settled.
    """

    def __init__(self, addresses: AddressRange, unsettled: set[tuple[int, int]]) -> None:
        self._addresses, self._unsettled = addresses, unsettled
        self._pool: torch.cuda.MemPool | None = addresses.new_pool()
        self._handle = self._pool.id
        unsettled.add(self._handle)

    @property
    def handle(self) -> tuple[int, int]:
        """See `Pool`."""
        return self._handle

    def taking(self) -> AbstractContextManager[None]:
        """See `Pool`."""
        return self._addresses.giving()

    def outlasting(self, tensor: Tensor) -> Tensor:
        """See `Pool`."""
        if not (tensor.numel() and self._addresses.holds(tensor)):
            return tensor
        # PyTorch neither frees it nor finds it by its address.
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.itemsize
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(storage, 0, tensor.shape, tensor.stride())

    def settle(self) -> int:
        """See `Pool`."""
        if alive := _alive(self.handle):
            raise CaptureError(
                f"the capture made {', '.join(map(_named, alive))}, which is kept, but recordings of other sizes "
                "use the same memory"
            )
        self._pool = None
        self._unsettled.discard(self.handle)
        return self._addresses.taken


def _alive(handle: tuple[int, int]) -> list[tuple[int, int]]:
    """Return address and size of a pool's blocks that something has."""
    if found := _blocks(handle):
        gc.collect()  # none ran meanwhile
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found = _blocks(handle)
    return found


def _blocks(handle: tuple[int, int]) -> list[tuple[int, int]]:
    blocks = [block for segment in _segments(handle) for block in segment["blocks"]]
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


class Arena(SlotMemory):
    """Addresses of one slot's recordings, each from the beginning.

    Args:
        new_range: Returns addresses for all that a slot may need.
    """

    def __init__(self, new_range: Callable[[], AddressRange]) -> None:
        self._new_range, self._addresses = new_range, new_range()
        # Of failed captures, by their handles: a pool kept here would keep its memory from others.
        self._unsettled: set[tuple[int, int]] = set()
        # What earlier recordings still use.
        self._abandoned: weakref.WeakSet[AddressRange] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """See `SlotMemory`."""
        return sum(each.nbytes for each in (self._addresses, *self._abandoned))

    def begin(self) -> ArenaPool:
        """See `SlotMemory`.

        What a failed capture made may live on, in its error's frames: PyTorch would mistake it for what comes next.
        """
        if any(_alive(handle) for handle in self._unsettled):
            self._abandoned.add(self._addresses)
            self._addresses = self._new_range()
        self._unsettled.clear()
        self._addresses.begin()
        return ArenaPool(self._addresses, self._unsettled)

    def keep(self, nbytes: int) -> None:
        """See `SlotMemory`."""
        self._addresses.keep(nbytes)


def making_in(addresses: AddressRange) -> Making:
    """Return what is entered around the making of tensors that recordings read and write.

    Args:
        addresses: What they lie behind, and nothing else; their content comes back with the memory.
    """
    pool = addresses.new_pool()

    @contextmanager
    def making() -> Iterator[None]:
        with addresses.giving(), torch.cuda.use_mem_pool(pool):
            yield

    return making
