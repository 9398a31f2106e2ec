"""A device's virtual memory on the host: it refuses what CUDA's driver refuses."""

from functools import partial

import torch

from bridge_cg_plugin.graphs.memory.ranges import (
    ALLOW,
    CREATE,
    MAP,
    OUT_OF_MEMORY,
    RELEASE,
    UNMAP,
    DeviceMemoryError,
    DriverTable,
    NoDeviceMemory,
)

FAILED = 999


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
        kinds = {"create": CREATE, "map": MAP, "allow": ALLOW, "unmap": UNMAP, "release": RELEASE}
        functions = (kind(partial(self._status, f"_{name}")) for name, kind in kinds.items())
        self.table = DriverTable(*functions, page=self.granularity, most=64)

    def _status(self, name, *args):
        """Return what a function of C returns."""
        try:
            getattr(self, name)(*args)
        except NoDeviceMemory:
            return OUT_OF_MEMORY
        except DeviceMemoryError:
            return FAILED
        return 0

    def name_of(self, status):
        return {OUT_OF_MEMORY: "no memory", FAILED: "failed"}[status]

    @property
    def mapped_bytes(self):
        return sum(self.sizes[handle] for handle in self.mapped.values())

    def content(self, address, nbytes):
        """Return what is in memory."""
        return b"".join(map(bytes, self._parts(address, nbytes)))

    def _block(self, address):
        for first, handle in self.mapped.items():
            if first <= address < first + self.sizes[handle]:
                return first, handle
        return None

    def _parts(self, address, nbytes):
        """Yield the memory behind some addresses, in as many parts as it was made in."""
        while nbytes:
            found = self._block(address)
            self._check("access", found is not None)
            first, handle = found
            part = memoryview(self.contents[handle])[address - first :][:nbytes]
            yield part
            address, nbytes = address + len(part), nbytes - len(part)

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

    def _create(self, handle, nbytes, properties, flags):
        self._check("create", nbytes > 0 and nbytes % self.granularity == 0)
        if nbytes > self.free_bytes:
            raise NoDeviceMemory("create")
        self.free_bytes -= nbytes
        self._handles += 1
        self.sizes[self._handles] = nbytes
        self.contents[self._handles] = bytearray(b"\xa5" * nbytes)
        handle[0] = self._handles

    def _release(self, handle):
        self._check("release", handle in self.sizes and handle not in self.mapped.values())
        self.free_bytes += self.sizes.pop(handle)
        del self.contents[handle]

    def _map(self, address, nbytes, offset, handle, flags):
        self._check("map", self.sizes[handle] == nbytes and address % self.granularity == 0)
        self._check("map", any(self._inside(address, nbytes, *each) for each in self.reserved.items()))
        taken = ((first, first + self.sizes[other]) for first, other in self.mapped.items())
        self._check("map", all(end <= address or address + nbytes <= first for first, end in taken))
        self.mapped[address] = handle

    def _allow(self, address, nbytes, access, count):
        self._check("allow", self.sizes[self.mapped.get(address)] == nbytes)

    def _unmap(self, address, nbytes):
        self._check("unmap", address in self.mapped and self.sizes[self.mapped[address]] == nbytes)
        del self.mapped[address]

    def wait(self):
        self._check("wait")

    def host_memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def read(self, address, content):
        self._check("read")
        content.copy_(torch.frombuffer(bytearray(self.content(address, len(content))), dtype=torch.uint8))

    def write(self, address, content):
        self._check("write")
        values = bytes(content.tolist())
        for part in self._parts(address, len(content)):
            part[:], values = values[: len(part)], values[len(part) :]
