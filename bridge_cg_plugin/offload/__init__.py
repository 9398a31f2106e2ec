"""Activation offloading and recompute inside captured graphs."""

from .registry import never_offload

__all__ = ["never_offload"]
