"""Modules in which Megatron wraps a model."""

from torch import nn

WRAPPER_DEPTH = 8


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return a model and what its wrappers hold, outermost first."""
    found = []
    for _ in range(WRAPPER_DEPTH):
        found.append(model)
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return found
