"""An executor without a GPU whose memory leaves: nothing that a recording made is there again when it returns."""

from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor

from bridge_cg_plugin.graphs.memory.virtual_memory import NoDeviceMemory

from .tape import TapeExecutor, TapeRecording

GARBAGE, SMALL_GARBAGE = 12345, {torch.bool: 1, torch.uint8: 123}


def spoil(tensor: Tensor) -> None:
    """Overwrite a tensor as if its memory had come from somebody else."""
    with torch.no_grad():
        tensor.fill_(torch.nan if tensor.is_floating_point() else SMALL_GARBAGE.get(tensor.dtype, GARBAGE))


class LeavingExecutor(TapeExecutor):
    """Records on tape. Whatever touches memory that has left fails.

    Recordings in one pool overwrite each other's memory, but for those whose forwards were recorded before a backward.

    Attributes:
        room: Whether memory that has left fits on the device again.
        left, returned, tries: How often memory left and returned, and how often it was to return.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.room, self.away = True, False
        self.left = self.returned = self.tries = 0
        self._recordings: list[TapeRecording] = []
        self._groups: dict[object, list[list[TapeRecording]]] = defaultdict(list)
        self.group_ended = True

    def new_pool(self) -> object:
        return object()

    @property
    def memory_away(self) -> bool:
        return self.away

    def release_memory(self) -> int:
        self.left, self.away = self.left + 1, True
        for recording in self._recordings:
            for made in recording.made():
                spoil(made)
        return 100

    def restore_memory(self) -> None:
        self.tries += 1
        if not self.room:
            raise NoDeviceMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.returned, self.away = self.returned + 1, False

    def _there(self) -> None:
        assert not self.away, "memory that has left was touched"

    def static_memory(self):
        @contextmanager
        def making():
            self._there()
            yield

        return making

    def warm_up(self, *args, **kwargs) -> None:
        self._there()
        super().warm_up(*args, **kwargs)

    def record_forward(self, body, pool):
        self._there()
        recording = super().record_forward(body, pool)
        self._recordings.append(recording)
        if self.group_ended:
            self._groups[pool].append([])
        self._groups[pool][-1].append(recording)
        self.group_ended = False
        return _Guarded(recording, self, pool)

    def touch(self, pool: object, recording: TapeRecording) -> None:
        """Write over what recordings left in a pool that was not recorded together with this one."""
        self._there()
        for other in (other for group in self._groups[pool] if recording not in group for other in group):
            for made in other.made():
                spoil(made)


class _Guarded:
    """A recording that is replayed only while its memory is there, and that has memory in common with others."""

    def __init__(self, recording: TapeRecording, executor: LeavingExecutor, pool: object) -> None:
        self._recording, self._executor, self._pool = recording, executor, pool
        self.outputs = recording.outputs

    def forward(self) -> None:
        self._executor.touch(self._pool, self._recording)
        self._recording.forward()

    def backward(self):
        self._executor.touch(self._pool, self._recording)
        return self._recording.backward()

    def record_backward(self) -> None:
        self._recording.record_backward()
        self._executor.group_ended = True
