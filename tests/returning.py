"""An executor without a GPU that gives weights addresses of their own, whose memory is spoiled when it leaves."""

import weakref

import torch

from bridge_cg_plugin.graphs.memory.returning_tensors import ReturningTensors
from bridge_cg_plugin.graphs.memory.tensor_homes import in_larger_storage
from bridge_cg_plugin.graphs.memory.virtual_memory import NoDeviceMemory
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from .leaving import Guarded

CPU = torch.device("cpu")


class Memories:
    """Makes memory.

    Attributes:
        room: Whether there is room for it, new or again.
        made: What was made.
    """

    def __init__(self):
        self.room, self.made = True, []

    def new(self, device):
        self.made.append(FakeMemory(self))
        return self.made[-1]

    @property
    def away(self):
        return self.made[-1].away


class FakeMemory:
    """Memory of the CPU, spoiled when it leaves; it holds no tensor that would share it."""

    def __init__(self, memories):
        self._memories, self.away, self._made = memories, False, []

    def make(self, like):
        if not self._memories.room:
            raise torch.OutOfMemoryError("made to fail")
        made = [in_larger_storage(tensor).fill_(torch.nan) for tensor in like]
        self._made += map(weakref.ref, made)
        return made

    def release(self):
        left, self.away = 0 if self.away else 100, True
        for tensor in [made() for made in self._made]:
            if tensor is not None and tensor.untyped_storage().nbytes():
                tensor.fill_(torch.nan)
        return left

    def restore(self):
        if self.away and not self._memories.room:
            raise NoDeviceMemory("made to fail")
        self.away = False

    def wait(self):
        assert not self.away


class Returning(ReferenceExecutor):
    """Gives tensors addresses of their own; counts what it records."""

    recorded = 0

    def __init__(self):
        super().__init__()
        self.memory = Memories()

    def returning_tensors(self):
        return ReturningTensors(CPU, self.memory.new)

    def record(self, body, pool):
        self.recorded += 1
        return super().record(body, pool)


class LeavingReturning(Returning):
    """Its other memory leaves as well: whatever replays without it fails.

    Attributes:
        left, returned: How often that memory left and returned.
    """

    def __init__(self):
        super().__init__()
        self.memory_away, self.left, self.returned = False, 0, 0

    def release_memory(self):
        self.left, self.memory_away = self.left + (not self.memory_away), True
        return 100

    def restore_memory(self):
        self.returned, self.memory_away = self.returned + self.memory_away, False

    def check_there(self):
        assert not self.memory_away, "memory that has left was touched"

    def record(self, body, pool):
        self.check_there()
        return Guarded(super().record(body, pool), self)
