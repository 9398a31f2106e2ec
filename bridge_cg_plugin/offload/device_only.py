"""Tensors that must stay on the device."""

from torch import Tensor

_MARK = "_bridge_cg_never_offload"
# What megatron-core asks of a tensor before it offloads it, release 0.19 and earlier ones.
CORE_MARKS = {"_do_not_offload": True, "offloading_activation": False}


def never_offload(tensor: Tensor) -> Tensor:
    """Keep a tensor, and what shares its memory, on the device whatever the policy says; returns the tensor.

    megatron-core, where it offloads, keeps the tensor itself.

    A mark counts once autograd saves the marked tensor itself or a tensor over the same memory after it: mark a tensor
    before it is used.
    """
    for name, value in {_MARK: True, **CORE_MARKS}.items():
        setattr(tensor, name, value)
    from .registry import current_registry

    registry = current_registry()
    if registry is not None:
        registry.record(tensor).pinned = True
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Whether `never_offload` was called with this very tensor."""
    return getattr(tensor, _MARK, False)
