"""An executor without a GPU whose memory leaves: nothing that a recording made is there again when it returns."""

from contextlib import contextmanager

from bridge_cg_plugin.graphs.memory.ranges import NoDeviceMemory

from .pooled import Memory, PooledExecutor, PooledRecording


class LeavingExecutor(PooledExecutor):
    """Records over memory of pools. Whatever touches memory that has left fails.

    Attributes:
        room: Whether memory that has left fits on the device again.
        left, returned, tries: How often memory left and returned, and how often it was to return.
        recorded: How many recordings were made.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.room, self.away = True, False
        self.left = self.returned = self.tries = self.recorded = 0
        self._memories: list[Memory] = []

    def new_memory(self) -> Memory:
        self._memories.append(super().new_memory())
        return self._memories[-1]

    @property
    def memory_away(self) -> bool:
        return self.away

    def release_memory(self) -> int:
        self.left, self.away = self.left + 1, True
        for memory in self._memories:
            memory.begin().spoil(set())
        return 100

    def restore_memory(self) -> None:
        self.tries += 1
        if not self.room:
            raise NoDeviceMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.returned, self.away = self.returned + 1, False

    def check_there(self) -> None:
        assert not self.away, "memory that has left was touched"

    def static_memory(self):
        @contextmanager
        def making():
            self.check_there()
            yield

        return making

    def warm_up(self, *args, **kwargs) -> None:
        self.check_there()
        super().warm_up(*args, **kwargs)

    def record_forward(self, body, pool):
        self.check_there()
        self.recorded += 1
        return Guarded(super().record_forward(body, pool), self)


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
