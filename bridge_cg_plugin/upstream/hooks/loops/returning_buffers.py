"""Buffers of a model that a loop moves by `model.to(...)`, which gives modules other tensors in their place.

Parameters stay the same tensors with other memory there. Recordings are of the tensors that they were made from, so a
buffer that is another tensor would be another model after every move.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class ReturningBuffers:
    """The buffers of a model as they are when the object is made.

    Args:
        models: The model's chunks.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._of: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        for module in (module for model in models for module in model.modules()):
            if held := {name: buffer for name, buffer in module._buffers.items() if buffer is not None}:
                self._of[module] = held

    def put_back(self) -> None:
        """Put tensors back that others like them have replaced, with the memory and values of these."""
        for module, held in self._of.items():
            for name, buffer in held.items():
                found = module._buffers.get(name)
                if found is not None and found is not buffer and _alike(buffer, found):
                    buffer.data = found
                    module._buffers[name] = buffer


def _alike(buffer: Tensor, found: Tensor) -> bool:
    plain = type(buffer) is type(found) is Tensor and not (buffer.requires_grad or found.requires_grad)
    return plain and _layout(buffer) == _layout(found)


def _layout(tensor: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()
