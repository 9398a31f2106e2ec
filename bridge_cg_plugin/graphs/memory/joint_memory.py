"""Memory of many regions' tensors in few pieces: each piece costs a look at PyTorch's memory when it leaves."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import tensor_homes
from .tensor_homes import Memory, PooledMemory


class JointMemories:
    """Makes memory for groups of tensors, such as those of a decoder's parts, in pieces of `GROUP_BYTES`.

    A tensor larger than that has a piece of its own.

    Args:
        new_memory: Makes a piece, on a device.
    """

    def __init__(self, new_memory: Callable[[torch.device], Memory] = PooledMemory) -> None:
        self._new_memory = new_memory
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()

    def new(self, device: torch.device) -> Memory:
        """Return memory for one group: a part of some piece."""
        return _Share(self, device)

    def piece(self, device: torch.device, nbytes: int) -> "_Piece":
        """Return a piece with room for so many more bytes.

        Raises:
            DeviceMemoryError: A new one cannot be made.
        """
        for piece in self._pieces:
            if piece.device == device and piece.nbytes + nbytes <= tensor_homes.GROUP_BYTES:
                return piece
        piece = _Piece(device, self._new_memory(device))
        self._pieces.add(piece)
        return piece


@dataclass(slots=True)
class _Part:
    """What a piece has of one share.

    Attributes:
        share: The share; its group may be gone while tensors still have the memory.
        storages: Of the tensors made.
        nbytes: Of the tensors made.
    """

    share: "weakref.ref[_Share]"
    storages: list[StorageWeakRef]
    nbytes: int

    @property
    def is_used(self) -> bool:
        share = self.share()
        return not self.is_gone if share is None else share.used

    @property
    def is_gone(self) -> bool:
        return self.share() is None and all(storage.expired() for storage in self.storages)


class _Piece:
    """Memory that leaves with the last of its shares, if no tensor without a group has any, and returns for the first.

    Its methods are those of `Memory`.
    """

    def __init__(self, device: torch.device, memory: Memory) -> None:
        self.device, self._memory = device, memory
        self._parts: list[_Part] = []

    @property
    def nbytes(self) -> int:
        """How much is in use, or will be when it has returned."""
        self._parts = [part for part in self._parts if not part.is_gone]
        return sum(part.nbytes for part in self._parts)

    def make(self, share: "_Share", like: Sequence[Tensor]) -> list[Tensor]:
        self.restore()
        try:
            made = self._memory.make(like)
        except torch.OutOfMemoryError:
            self.release()
            raise
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in made]
        self._parts.append(_Part(weakref.ref(share), storages, sum(tensor.nbytes for tensor in like)))
        return made

    def release(self) -> int:
        return 0 if any(part.is_used for part in self._parts) else self._memory.release()

    def restore(self) -> None:
        self._memory.restore()

    def wait(self) -> None:
        self._memory.wait()


class _Share:
    """See `Memory`: a part of a piece. It leaves with the last share of the piece that is released."""

    def __init__(self, memories: JointMemories, device: torch.device) -> None:
        self._memories, self._device = memories, device
        self._piece: _Piece | None = None
        self.used = False

    def make(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See `Memory`."""
        piece = self._memories.piece(self._device, sum(tensor.nbytes for tensor in like))
        made = piece.make(self, like)
        self._piece, self.used = piece, True
        return made

    def release(self) -> int:
        """See `Memory`."""
        self.used = False
        return 0 if self._piece is None else self._piece.release()

    def restore(self) -> None:
        """See `Memory`."""
        if self._piece is not None:
            self._piece.restore()
            self.used = True

    def wait(self) -> None:
        """See `Memory`."""
        if self._piece is not None:
            self._piece.wait()
