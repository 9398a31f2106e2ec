"""A region's modules."""

from collections.abc import Sequence

from torch import nn


def every_module(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the roots and all modules below them, each once, in the order of `nn.Module.modules`."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))
