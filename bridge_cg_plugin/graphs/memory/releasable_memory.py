"""Device memory that leaves and comes back to the same addresses, so that graphs over it stay valid."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from .virtual_memory import VirtualMemory


@dataclass(slots=True)
class _Range:
    """Addresses, for good, and what is behind them.

    Attributes:
        address: The first one.
        nbytes: How many there are.
        kept: Whether content comes back with the memory.
        handle: Of the memory behind them; None while it has left.
        content: Where the host keeps it meanwhile; empty before it left for the first time, and where it is not kept.
    """

    address: int
    nbytes: int
    kept: bool
    handle: int | None = None
    content: bytearray = field(default_factory=bytearray, repr=False)


class ReleasableMemory:
    """Ranges of addresses whose memory leaves and returns together.

    Args:
        driver: What makes addresses and memory.

    Attributes:
        away: Whether memory of some range has left.
    """

    def __init__(self, driver: VirtualMemory) -> None:
        self._driver = driver
        self._ranges: dict[int, _Range] = {}
        self._lock = threading.Lock()  # autograd's threads allocate, too
        self.away = False

    @property
    def addresses(self) -> frozenset[int]:
        """Where the ranges begin."""
        return frozenset(self._ranges)

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return sum(each.nbytes for each in self._ranges.values() if each.handle is not None)

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
            found = _Range(self._driver.reserve(size), size, kept)
            try:
                self._put_memory(found)
            except Exception:
                self._driver.free(found.address, size)
                raise
            self._ranges[found.address] = found
            return found.address

    def release(self) -> int:
        """Take the memory of all ranges off the device, which works on none of it; returns how many bytes left."""
        with self._lock:
            there = [each for each in self._ranges.values() if each.handle is not None]
            for each in there:
                if each.kept:
                    each.content = each.content or bytearray(each.nbytes)
                    self._driver.read(each.address, each.content)
            self.away = self.away or bool(there)
            for each in there:
                self._take_memory(each)
            return sum(each.nbytes for each in there)

    def restore(self) -> None:
        """Put memory behind all addresses again. What was not kept has any content.

        Raises:
            NoDeviceMemory: There is not enough for all; then none came back.
        """
        with self._lock:
            missing = [each for each in self._ranges.values() if each.handle is None]
            try:
                for each in missing:
                    self._put_memory(each)
                    if each.kept:
                        self._driver.write(each.address, each.content)
            except Exception:
                for each in missing:
                    self._take_memory(each)
                raise
            self.away = False

    def keep(self, used: Collection[int]) -> None:
        """Give ranges back that begin at none of these addresses: nobody uses them any more."""
        with self._lock:
            for address in [address for address in self._ranges if address not in used]:
                unused = self._ranges.pop(address)
                self._take_memory(unused)
                self._driver.free(address, unused.nbytes)
            self.away = any(each.handle is None for each in self._ranges.values())

    def _put_memory(self, found: _Range) -> None:
        handle = self._driver.create(found.nbytes)
        try:
            self._driver.map(found.address, found.nbytes, handle)
        except Exception:
            self._driver.destroy(handle)
            raise
        found.handle = handle

    def _take_memory(self, found: _Range) -> None:
        if found.handle is None:
            return
        self._driver.unmap(found.address, found.nbytes)
        handle, found.handle = found.handle, None
        self._driver.destroy(handle)
