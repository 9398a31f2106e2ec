"""Activation offloading and recompute inside captured graphs."""

from .marks import never_offload

__all__ = ["never_offload"]
