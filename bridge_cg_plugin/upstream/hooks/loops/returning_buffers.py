"""Buffers of a model that a loop moves by `model.to(...)`, which gives modules other tensors in their place.

Parameters stay the same tensors with other memory there. Recordings are of the tensors that they were made from, so a
buffer that is another tensor would be another model after every move.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_Layout = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]


class _Held(NamedTuple):
    """A module's buffer.

    Attributes:
        buffer: The buffer.
        layout: What it was at first.
        shared: Whether the model has it in another place, too, where values that replace it here must not be seen.
    """

    buffer: Tensor
    layout: _Layout
    shared: bool


class ReturningBuffers:
    """The buffers of a model as they are when the object is made.

    Args:
        models: The model's chunks.
        others: Modules of theirs whose buffers somebody else puts back.
    """

    def __init__(self, models: Iterable[nn.Module], others: Iterable[nn.Module] = ()) -> None:
        self._of: WeakKeyDictionary[nn.Module, dict[str, _Held]] = WeakKeyDictionary()
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        tables = (table for module in modules for table in (vars(module), module._buffers))
        places = Counter(id(each) for table in tables for each in table.values() if isinstance(each, Tensor))
        left = {module for other in others for module in other.modules()}
        for module in (each for each in modules if each not in left):
            there = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            if there:
                self._of[module] = {name: _Held(b, _layout(b), places[id(b)] > 1) for name, b in there.items()}

    def put_back(self) -> None:
        """Put tensors back that others like them have replaced, with the memory and values of these."""
        for module, name, held, found in self._replaced():
            if _layout(found) == held.layout and _may_get(held, found):
                _fill(held.buffer, found)
                module._buffers[name] = held.buffer

    def let_go(self) -> None:
        """Free the memory of tensors that others have replaced while the model is off the device."""
        for _, _, held, found in self._replaced():
            if torch._has_compatible_shallow_copy_type(held.buffer, found) and _may_get(held, found):
                _fill(held.buffer, found)

    def _replaced(self) -> Iterator[tuple[nn.Module, str, _Held, Tensor]]:
        """Yield the buffers that others have replaced: module, name, buffer, and the other one."""
        for module, there in self._of.items():
            for name, held in there.items():
                found = module._buffers.get(name)
                if found is not None and found is not held.buffer and _is_plain(held.buffer) and _is_plain(found):
                    yield module, name, held, found


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.requires_grad


def _layout(tensor: Tensor) -> _Layout:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _may_get(held: _Held, found: Tensor) -> bool:
    """Whether a buffer may have the values of what replaced it, which its other places then have as well."""
    if not held.shared:
        return True
    comparable = held.buffer.dtype == found.dtype and not (held.buffer.is_meta or found.is_meta)
    return comparable and torch.equal(held.buffer.to(found.device), found)


def _fill(buffer: Tensor, found: Tensor) -> None:
    """Give a buffer another tensor's memory; recordings of a value on the host see it as written to."""
    buffer.data = found
    if not buffer.is_inference():
        increment_version(buffer)
