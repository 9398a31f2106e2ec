"""A device's virtual memory on the host: it refuses what CUDA's driver refuses."""

import torch

from bridge_cg_plugin.graphs.memory.virtual_memory import DeviceMemoryError, NoDeviceMemory


class FakeVirtualMemory:
    """Memory of a small device. See `VirtualMemory`.

    Attributes:
        free_bytes: What others have left.
        mapped: Handles by first address.
        reserved: Sizes by first address.
        contents: Of memory, by handle.
        sizes: Of memory, by handle.
        fails: Name of a call that fails from now on.
    """

    granularity = 8

    def __init__(self, free_bytes=1 << 20):
        self.free_bytes, self.fails = free_bytes, None
        self.mapped, self.reserved, self.contents, self.sizes = {}, {}, {}, {}
        self._next = 1000 * self.granularity
        self._handles = 0

    @property
    def mapped_bytes(self):
        return sum(self.sizes[handle] for handle in self.mapped.values())

    def has_memory(self, address):
        """Whether memory is behind an address."""
        return self._block(address) is not None

    def content(self, address, nbytes):
        """Return what is in memory."""
        return bytes(self._part(address, nbytes))

    def _block(self, address):
        for first, handle in self.mapped.items():
            if first <= address < first + self.sizes[handle]:
                return first, handle
        return None

    def _part(self, address, nbytes):
        found = self._block(address)
        self._check("access", found is not None)
        first, handle = found
        self._check("access", address + nbytes <= first + self.sizes[handle])
        return memoryview(self.contents[handle])[address - first : address - first + nbytes]

    def _check(self, name, whether=True):
        if self.fails == name or not whether:
            raise DeviceMemoryError(name)

    def _inside(self, address, nbytes, first, size):
        return first <= address and address + nbytes <= first + size

    def reserve(self, nbytes):
        self._check("reserve", nbytes > 0 and nbytes % self.granularity == 0)
        address, self._next = self._next, self._next + nbytes
        self.reserved[address] = nbytes
        return address

    def free(self, address, nbytes):
        self._check("free", self.reserved.get(address) == nbytes)
        self._check("free", not any(address <= first < address + nbytes for first in self.mapped))
        del self.reserved[address]

    def create(self, nbytes):
        self._check("create", nbytes > 0 and nbytes % self.granularity == 0)
        if nbytes > self.free_bytes:
            raise NoDeviceMemory("create")
        self.free_bytes -= nbytes
        self._handles += 1
        self.sizes[self._handles] = nbytes
        self.contents[self._handles] = bytearray(b"\xa5" * nbytes)
        return self._handles

    def destroy(self, handle):
        self._check("destroy", handle in self.sizes and handle not in self.mapped.values())
        self.free_bytes += self.sizes.pop(handle)
        del self.contents[handle]

    def map(self, address, nbytes, handle):
        self._check("map", self.sizes[handle] == nbytes and address % self.granularity == 0)
        self._check("map", any(self._inside(address, nbytes, *each) for each in self.reserved.items()))
        taken = ((first, first + self.sizes[other]) for first, other in self.mapped.items())
        self._check("map", all(end <= address or address + nbytes <= first for first, end in taken))
        self.mapped[address] = handle

    def unmap(self, address, nbytes):
        self._check("unmap", address in self.mapped and self.sizes[self.mapped[address]] == nbytes)
        del self.mapped[address]

    def host_memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, address, other, nbytes):
        self._check("copy")
        self._part(address, nbytes)[:] = bytes(self._part(other, nbytes))

    def read(self, address, content):
        self._check("read")
        content.copy_(torch.frombuffer(self._part(address, len(content)), dtype=torch.uint8))

    def write(self, address, content):
        self._check("write")
        self._part(address, len(content))[:] = bytes(content.tolist())
