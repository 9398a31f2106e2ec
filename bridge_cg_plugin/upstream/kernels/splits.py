"""Gradients of queries, keys and values that attention wrote side by side stay where they are while work is recorded.

megatron-core would split projections by Transformer Engine's function, whose backward copies nothing then, but asks for
it by a name that Transformer Engine gave up before 2.14. It falls back on PyTorch's, whose backward copies all three.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from ..attributes import overridden
from ..seams.registry.engine import CORE_ATTENTION, TE_UTILS

SPLIT = "SplitAlongDim"


@contextmanager
def splits_without_copies() -> Iterator[None]:
    """Let megatron-core's attention split projections by Transformer Engine's function."""
    attention = importlib.import_module(CORE_ATTENTION)
    if getattr(attention, SPLIT) is not None:
        yield
        return
    with overridden(attention, SPLIT, getattr(importlib.import_module(TE_UTILS), SPLIT).apply):
        yield
