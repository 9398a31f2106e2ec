"""An executor without a GPU whose memory leaves: nothing that a recording made is there again when it returns."""

from contextlib import contextmanager

from bridge_cg_plugin.graphs.memory.ranges import NoDeviceMemory

from .pooled import Memory, PooledExecutor, PooledRecording


class Leaving:
    """An executor whose memory leaves. Whatever touches memory that has left fails.

    Attributes:
        room: Whether memory that has left fits on the device again.
        memory_away: Whether it has left.
        left, returned, tries: How often memory left and returned, and how often it was to return.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.room, self.memory_away = True, False
        self.left = self.returned = self.tries = 0

    def release_memory(self) -> int:
        self.left, self.memory_away = self.left + (not self.memory_away), True
        return 100

    def restore_memory(self) -> None:
        self.tries += 1
        if not self.room:
            raise NoDeviceMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.returned, self.memory_away = self.returned + self.memory_away, False

    def check_there(self) -> None:
        assert not self.memory_away, "memory that has left was touched"

    def record_forward(self, body, pool):
        self.check_there()
        return Guarded(super().record_forward(body, pool), self)


class LeavingExecutor(Leaving, PooledExecutor):
    """Records over memory of pools."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._memories: list[Memory] = []

    def new_memory(self) -> Memory:
        self._memories.append(super().new_memory())
        return self._memories[-1]

    def release_memory(self) -> int:
        for memory in self._memories:
            memory.begin().spoil(set())
        return super().release_memory()

    @contextmanager
    def static_memory(self):
        self.check_there()
        yield

    def warm_up(self, *args, **kwargs) -> None:
        self.check_there()
        super().warm_up(*args, **kwargs)


class Guarded:
    """A recording that is replayed only while its memory is there."""

    def __init__(self, recording: PooledRecording, executor: LeavingExecutor) -> None:
        self._recording, self._executor = recording, executor
        self.outputs = recording.outputs

    def forward(self) -> None:
        self._executor.check_there()
        self._recording.forward()

    def backward(self):
        self._executor.check_there()
        return self._recording.backward()

    def record_backward(self) -> None:
        self._recording.record_backward()
