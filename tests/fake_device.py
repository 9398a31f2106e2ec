"""A device's virtual memory on the host: it refuses what CUDA's driver refuses."""

from bridge_cg_plugin.graphs.memory.virtual_memory import DeviceMemoryError, NoDeviceMemory


class FakeVirtualMemory:
    """Memory of a small device. See `VirtualMemory`.

    Attributes:
        free_bytes: What others have left.
        mapped: By first address: size, handle.
        reserved: Sizes by first address.
        contents: Of mapped memory by handle; None for memory of which nothing was written.
        fails: Name of a call that fails from now on.
    """

    granularity = 8

    def __init__(self, free_bytes=1 << 20):
        self.free_bytes, self.fails = free_bytes, None
        self.mapped, self.reserved, self.contents, self.sizes = {}, {}, {}, {}
        self._next = 1000 * self.granularity
        self._handles = 0

    def _check(self, name, whether=True):
        if self.fails == name or not whether:
            raise DeviceMemoryError(name)

    def reserve(self, nbytes):
        self._check("reserve", nbytes > 0 and nbytes % self.granularity == 0)
        address, self._next = self._next, self._next + nbytes
        self.reserved[address] = nbytes
        return address

    def free(self, address, nbytes):
        self._check("free", self.reserved.get(address) == nbytes and address not in self.mapped)
        del self.reserved[address]

    def create(self, nbytes):
        self._check("create", nbytes % self.granularity == 0)
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
        self._check("map", address not in self.mapped)
        self._check("map", self.reserved[address] == nbytes == self.sizes[handle])
        self.mapped[address] = handle

    def unmap(self, address, nbytes):
        self._check("unmap", address in self.mapped and self.reserved[address] == nbytes)
        del self.mapped[address]

    def read(self, address, content):
        self._check("read", address in self.mapped)
        content[:] = self.contents[self.mapped[address]]

    def write(self, address, content):
        self._check("write", address in self.mapped)
        self.contents[self.mapped[address]][:] = content
