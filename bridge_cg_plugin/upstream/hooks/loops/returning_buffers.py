"""Buffers of a model that a loop moves by `model.to(...)`, which gives modules other tensors in their place.

Parameters stay the same tensors with other memory there. Recordings are of the tensors that they were made from, so a
buffer that is another tensor would be another model after every move.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version


class _Held(NamedTuple):
    """A module's buffer.

    Attributes:
        buffer: The buffer.
        shared: Whether the model has it in another place, too, where values that replace it here must not be seen.
    """

    buffer: Tensor
    shared: bool


class ReturningBuffers:
    """The buffers of a model as they are when the object is made.

    Args:
        models: The model's chunks.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._of: WeakKeyDictionary[nn.Module, dict[str, _Held]] = WeakKeyDictionary()
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        tables = (table for module in modules for table in (vars(module), module._buffers))
        places = Counter(id(each) for table in tables for each in table.values() if isinstance(each, Tensor))
        for module in modules:
            there = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            if there:
                self._of[module] = {name: _Held(each, places[id(each)] > 1) for name, each in there.items()}

    def put_back(self) -> None:
        """Put tensors back that others like them have replaced, with the memory and values of these."""
        for module, there in self._of.items():
            for name, held in there.items():
                found = module._buffers.get(name)
                if found is not None and found is not held.buffer and _can_return(held, found):
                    module._buffers[name] = _filled(held.buffer, found)


def _can_return(held: _Held, found: Tensor) -> bool:
    buffer = held.buffer
    plain = type(buffer) is type(found) is Tensor and not (buffer.requires_grad or found.requires_grad)
    alike = plain and _layout(buffer) == _layout(found)
    return alike and (not held.shared or torch.equal(buffer, found))


def _layout(tensor: Tensor) -> tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _filled(buffer: Tensor, found: Tensor) -> Tensor:
    """Return a buffer with another tensor's memory; recordings of a value on the host see it as written to."""
    buffer.data = found
    if not buffer.is_inference():
        increment_version(buffer)
    return buffer
