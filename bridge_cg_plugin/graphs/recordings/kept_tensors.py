"""Tensors of modules that passes of a recording leave as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KeptTensors:
    """What tensors hold as the object is made, for those that count passes: warm-up is no training.

    Args:
        tensors: Buffers, and what attributes hold. Weights and what is quantized of them are not updated by passes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        kept = (tensor for tensor in tensors if type(tensor) is Tensor and not tensor.is_inference())
        self._held = [(tensor, tensor.clone()) for tensor in kept]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back afterwards what changes inside; a table that only earlier passes filled stays filled."""
        versions = [tensor._version for tensor, _ in self._held]
        try:
            yield
        finally:
            with torch.no_grad():
                for (tensor, values), version in zip(self._held, versions, strict=True):
                    if tensor._version != version:
                        tensor.copy_(values)
