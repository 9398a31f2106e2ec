"""Activation offloading and recompute inside captured graphs."""

from .device_only import never_offload

__all__ = ["never_offload"]
