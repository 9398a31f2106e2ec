"""Tensors that must stay on the device."""

from torch import Tensor

_MARK = "_bridge_cg_never_offload"


def never_offload(tensor: Tensor) -> Tensor:
    """Keep a tensor, and what shares its memory, on the device whatever the policy says; returns the tensor.

    A mark counts once autograd saves the marked tensor itself or a tensor over the same memory after it: mark a tensor
    before it is used.
    """
    setattr(tensor, _MARK, True)
    from .registry import current_registry

    registry = current_registry()
    if registry is not None:
        registry.record(tensor).pinned = True
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Whether `never_offload` was called with this very tensor."""
    return getattr(tensor, _MARK, False)
