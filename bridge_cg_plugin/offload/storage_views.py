"""Tensors as views of raw storage: bytes are copied, and come back with dtype, shape, strides and offset."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class View:
    """One tensor over a storage.

    Attributes:
        dtype: Element type.
        shape: Shape.
        strides: Strides in elements.
        offset: Offset of the first element, in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a new tensor object that sees the storage through this view."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.strides)


def view_of(tensor: Tensor) -> View:
    """Return how a tensor sees its storage."""
    return View(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def raw_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as `[bytes]` uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def can_travel(tensor: Tensor) -> bool:
    """Whether a tensor is bytes and a view of them, and nothing more.

    Parameters stay, and so do tensor classes with state of their own, which pass their parts to autograd themselves,
    sparse tensors, and lazily conjugated or negated ones.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not isinstance(tensor, nn.Parameter)
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()
