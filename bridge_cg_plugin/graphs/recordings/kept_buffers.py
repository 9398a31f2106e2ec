"""Buffers of modules that passes of a recording leave as they were."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..modules import every_module


class KeptBuffers:
    """What modules' buffers hold as the object is made, for those that count passes: warm-up is no training.

    Args:
        roots: The modules, with all below them.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        buffers = (buffer for module in every_module(roots) for buffer in module.buffers(recurse=False))
        self._held = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_inference()]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back afterwards what changes inside; a table that only earlier passes filled stays filled."""
        versions = [buffer._version for buffer, _ in self._held]
        try:
            yield
        finally:
            with torch.no_grad():
                for (buffer, values), version in zip(self._held, versions, strict=True):
                    if buffer._version != version:
                        buffer.copy_(values)
