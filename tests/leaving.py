"""An executor without a GPU whose memory leaves: nothing that a recording made is there again when it returns."""

from contextlib import contextmanager

import torch
from torch import Tensor

from bridge_cg_plugin.graphs.memory.virtual_memory import NoDeviceMemory

from .tape import TapeExecutor, TapeRecording

GARBAGE = 12345


def spoil(tensor: Tensor) -> None:
    """Overwrite a tensor as if its memory had come from somebody else."""
    with torch.no_grad():
        tensor.fill_(
            torch.nan if tensor.is_floating_point() else GARBAGE % 2 if tensor.dtype == torch.bool else GARBAGE
        )


class LeavingExecutor(TapeExecutor):
    """Records on tape. Whatever touches memory that has left fails.

    Attributes:
        room: Whether memory that has left fits on the device again.
        left, returned, tries: How often memory left and returned, and how often it was to return.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.room, self.away = True, False
        self.left = self.returned = self.tries = 0
        self._recordings: list[TapeRecording] = []

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

    def record(self, body, pool):
        self._there()
        recording = super().record(body, pool)
        self._recordings.append(recording)
        return _Guarded(recording, self._there)


class _Guarded:
    """A recording that is replayed only while its memory is there."""

    def __init__(self, recording, there) -> None:
        self._recording, self._there = recording, there
        self.outputs = recording.outputs

    def forward(self) -> None:
        self._there()
        self._recording.forward()

    def backward(self):
        self._there()
        return self._recording.backward()
