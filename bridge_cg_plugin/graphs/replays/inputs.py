"""Inputs for which a recording returns no gradient."""

from collections.abc import Iterable

import torch
from torch import Tensor


def want_gradients(inputs: Iterable[Tensor | None]) -> bool:
    """Return whether autograd would compute a gradient for one of these inputs now."""
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
