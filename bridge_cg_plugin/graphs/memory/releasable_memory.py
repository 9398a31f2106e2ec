"""Device memory that leaves and comes back to the same addresses, so that graphs over it stay valid."""

import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ...announce import LOGGER
from .addresses import ARENA_BYTES, Addresses
from .divided_blocks import divide
from .virtual_memory import DeviceMemoryError, VirtualMemory


@dataclass(slots=True)
class _Range:
    """Addresses, for good.

    Attributes:
        address: The first one.
        nbytes: How many there are.
        arena: Which of `Addresses` they are from.
        kept: Whether content comes back with the memory.
        block: The memory behind them; None while it has left.
        content: Where the host keeps it meanwhile; None before it left for the first time, and where it is not kept.
    """

    address: int
    nbytes: int
    arena: int
    kept: bool
    block: "_Block | None" = None
    content: Tensor | None = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class _Block:
    """Memory behind neighbouring ranges of one arena, some of which may be out of use.

    Attributes:
        address: The first one.
        nbytes: How much it is.
        handle: Of the memory.
        ranges: Those in use.
    """

    address: int
    nbytes: int
    handle: int
    ranges: list[_Range]

    @property
    def unused_bytes(self) -> int:
        """How much is behind ranges out of use."""
        return self.nbytes - sum(each.nbytes for each in self.ranges)


class ReleasableMemory:
    """Ranges of addresses whose memory leaves and returns together.

    A range is allocated with memory of its own. Memory that returns is one block behind as many neighbours as there
    are: the driver takes as long for any block. What is behind a range that nobody uses any more goes back with the
    block's last one, when memory leaves, or by `shrink`.

    Args:
        driver: What makes addresses and memory.
        arena_bytes: Most addresses that may have one block.

    Attributes:
        away: Whether memory of some range has left.
    """

    def __init__(self, driver: VirtualMemory, arena_bytes: int = ARENA_BYTES) -> None:
        self._driver, self._supply = driver, Addresses(driver, arena_bytes)
        self._ranges: dict[int, _Range] = {}
        self._blocks: set[_Block] = set()
        self._lock = threading.Lock()  # autograd's threads allocate, too
        self.away = False

    @property
    def addresses(self) -> frozenset[int]:
        """Where the ranges begin."""
        return frozenset(self._ranges)

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def unused_bytes(self) -> int:
        """Bytes on the device now that `shrink` may give back."""
        return sum(block.unused_bytes for block in self._blocks)

    def allocate(self, nbytes: int, kept: bool = False) -> int:
        """Return the address of new memory.

        Args:
            nbytes: How much, at least.
            kept: Whether its content comes back with it.

        Raises:
            NoDeviceMemory: There is not enough.
        """
        step = self._driver.granularity
        size = -(-nbytes // step) * step
        with self._lock:
            address, arena = self._supply.take(size)
            found = _Range(address, size, arena, kept)
            try:
                self._put_memory([found])
            except Exception:
                self._supply.give_back(arena)
                raise
            self._ranges[address] = found
            return address

    def release(self) -> int:
        """Take the memory of all ranges off the device, which works on none of it; returns how many bytes left."""
        with self._lock:
            there = [each for each in self._ranges.values() if each.block is not None]
            for each in there:
                if each.kept:
                    if each.content is None:
                        each.content = self._driver.host_memory(each.nbytes)
                    self._driver.read(each.address, each.content)
            left = self.nbytes
            self.away = self.away or bool(there)
            for block in list(self._blocks):
                self._take_memory(block)
            return left

    def restore(self) -> None:
        """Put memory behind all addresses again. What was not kept has any content.

        Raises:
            NoDeviceMemory: There is not enough for all; then none came back.
        """
        with self._lock:
            made = []
            try:
                for neighbours in _neighbours(each for each in self._ranges.values() if each.block is None):
                    made.append(self._put_memory(neighbours))
                    for each in neighbours:
                        if each.content is not None:
                            self._driver.write(each.address, each.content)
            except Exception:
                for block in made:
                    self._take_memory(block)
                raise
            self.away = False

    def keep(self, used: Collection[int]) -> None:
        """Give ranges back that begin at none of these addresses: nobody uses them any more."""
        with self._lock:
            for address in [address for address in self._ranges if address not in used]:
                unused = self._ranges.pop(address)
                if unused.block is not None:
                    unused.block.ranges.remove(unused)
                    if not unused.block.ranges:
                        self._take_memory(unused.block)
                self._supply.give_back(unused.arena)
            self.away = any(each.block is None for each in self._ranges.values())

    def shrink(self) -> None:
        """Give memory back that is in a block with other memory, behind ranges that nobody uses any more.

        The device works on no memory of these blocks. Where the other memory has no room to move to, all of it stays.
        """
        with self._lock:
            for block in sorted(self._blocks, key=lambda block: block.nbytes - block.unused_bytes):
                if block.unused_bytes:
                    try:
                        self._divide(block)
                    except DeviceMemoryError as error:
                        LOGGER.info("memory of graphs that were dropped stays until all leaves: %s", error)

    def _divide(self, block: _Block) -> None:
        parts = list(_neighbours(block.ranges))
        places = list(map(_place, parts))
        handles = divide(self._driver, block.address, block.nbytes, block.handle, places)
        self._blocks.discard(block)
        for (address, nbytes), handle, part in zip(places, handles, parts, strict=True):
            self._add_block(_Block(address, nbytes, handle, part))
        self._driver.destroy(block.handle)

    def _put_memory(self, neighbours: list[_Range]) -> _Block:
        address, nbytes = _place(neighbours)
        handle = self._driver.create(nbytes)
        try:
            self._driver.map(address, nbytes, handle)
        except Exception:
            self._driver.destroy(handle)
            raise
        return self._add_block(_Block(address, nbytes, handle, neighbours))

    def _add_block(self, block: _Block) -> _Block:
        self._blocks.add(block)
        for each in block.ranges:
            each.block = block
        return block

    def _take_memory(self, block: _Block) -> None:
        self._driver.unmap(block.address, block.nbytes)
        self._blocks.discard(block)
        for each in block.ranges:
            each.block = None
        self._driver.destroy(block.handle)


def _place(neighbours: list[_Range]) -> tuple[int, int]:
    """Return the first address of neighbours and how many they have."""
    return neighbours[0].address, sum(each.nbytes for each in neighbours)


def _neighbours(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Yield ranges in lists of neighbours of one arena."""
    found: list[_Range] = []
    for each in sorted(ranges, key=lambda each: each.address):
        last = found[-1] if found else None
        if last is not None and (last.arena, last.address + last.nbytes) != (each.arena, each.address):
            yield found
            found = []
        found.append(each)
    if found:
        yield found
