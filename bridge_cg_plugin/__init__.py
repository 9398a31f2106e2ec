"""CUDA graphs for vision-language training on Megatron-Bridge that compute what eager computes."""

from .plugin import activate, deactivate, enable, release_memory, status

__version__ = "0.1.0"
__all__ = ["__version__", "activate", "deactivate", "enable", "release_memory", "status"]
