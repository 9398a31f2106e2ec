"""Imports the whole stack without initializing CUDA, so that processes can be forked afterwards.

Loaded by the fork server of `processes`. Imports ask for the device's compute capability, which would initialize CUDA;
here the driver's own tool answers.
"""

import functools
import shutil
import subprocess

import torch


@functools.cache
def compute_capability(device: object = None) -> tuple[int, int]:
    """Return the first GPU's compute capability as nvidia-smi tells it; (0, 0) without that tool."""
    if shutil.which("nvidia-smi") is None:
        return (0, 0)
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    major, minor = subprocess.check_output(command, text=True).split()[0].split(".")
    return int(major), int(minor)


original = torch.cuda.get_device_capability
torch.cuda.get_device_capability = compute_capability
try:
    from . import training  # noqa: F401
finally:
    torch.cuda.get_device_capability = original
