"""An executor without a GPU that gives weights addresses of their own, whose memory is spoiled when it leaves."""

from contextlib import nullcontext

import numpy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bridge_cg_plugin.graphs.memory.ranges import NoDeviceMemory
from bridge_cg_plugin.graphs.memory.returning import Home
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from .leaving import Leaving

CPU = torch.device("cpu")
NO_LIMIT = 2**20
# Of a home, which may need them all; the host backs them when they are written.
BYTES, ALIGNED, SPOILED = 2**22, 64, numpy.uint8(255)


class Filled(Home):
    """Gives storages PyTorch's memory; counts how often, or fails as it is told to."""

    fails, filled = None, 0

    def begin(self):
        if self.fails is not None:
            raise self.fails("made to fail")
        self.filled += 1

    def taking(self):
        return nullcontext()


class Homes:
    """Makes homes.

    Attributes:
        room: For how many groups of tensors there is room on the device.
        made: What was made.
        groups: How many groups of tensors got memory there.
        ranges: How many ranges of addresses were used.
    """

    def __init__(self):
        self.room, self.made, self.groups, self.ranges = NO_LIMIT, [], 0, 0

    def new(self, device):
        self.made.append(FakeHome(device, self))
        return self.made[-1]

    @property
    def away(self):
        return all(home.away for home in self.made)


class FakeHome(Home):
    """Addresses of the host, spoiled when their memory leaves."""

    def __init__(self, device, homes):
        super().__init__(device)
        self._homes, self.away, self._range, self._made = homes, True, None, []

    def begin(self):
        if not self._homes.room:
            raise NoDeviceMemory("made to fail")
        if self._range is None or self._is_used():
            self._range, self._made = numpy.full(BYTES, SPOILED), []
            self._homes.ranges += 1
        self.away, self._taken, self._groups = False, 0, 0

    def make(self, like):
        self._groups, self._homes.groups = self._groups + 1, self._homes.groups + 1
        if self._groups > self._homes.room:
            raise torch.OutOfMemoryError("made to fail")
        return list(map(self._tensor, like))

    def _tensor(self, like):
        begin, self._taken = self._taken, self._taken + -(-like.nbytes // ALIGNED) * ALIGNED
        made = torch.from_numpy(self._range[begin : begin + like.nbytes]).view(like.dtype).view(like.shape)
        self._made.append(StorageWeakRef(made.untyped_storage()))
        return made

    def _is_used(self):
        return any(not storage.expired() for storage in self._made)

    def holds(self, memory):
        first = 0 if self._range is None else self._range.ctypes.data
        return first <= memory.data_ptr() < first + BYTES

    def release(self):
        if self._is_used() or self.away:
            return 0
        self._range[:], self.away = SPOILED, True
        return 100

    def wait(self):
        assert not self.away


class Returning(ReferenceExecutor):
    """Gives tensors addresses of their own; counts what it records."""

    recorded = 0

    def __init__(self):
        super().__init__()
        self.homes = Homes()

    def home(self):
        return self.homes.new(CPU)

    def record_forward(self, body, pool):
        self.recorded += 1
        return super().record_forward(body, pool)


class LeavingReturning(Leaving, Returning):
    """Its other memory leaves as well."""
