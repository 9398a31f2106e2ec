"""Imports what trains once, in the process that training processes are forked from; see `forks`.

A process that has asked CUDA's driver for anything cannot be forked. So while the stack is imported PyTorch finds GPUs
through NVML, and what asks for a GPU's compute capability gets it from `nvidia-smi`.
"""

import importlib
import subprocess
import threading
import traceback
from pathlib import Path
from unittest import mock

import torch

MODULE = "examples.photographs.training"
THREADS = Path("/proc/self/task")
# Arrow's allocator starts it, and starts it anew in a fork.
KNOWN_THREADS = {"jemalloc_bg_thd"}


def compute_capability(device: object = None) -> tuple[int, int]:
    """Return that of the machine's first GPU; see `torch.cuda.get_device_capability`."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    major, minor = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0].split(".")
    return int(major), int(minor)


def other_threads() -> set[str]:
    """Return the names of this process's threads but for the one that asks."""
    asking = str(threading.get_native_id())
    return {(thread / "comm").read_text().strip() for thread in THREADS.iterdir() if thread.name != asking}


def fits() -> bool:
    """Whether a process forked from this one can train: it finds a GPU if there is one, and no thread was lost."""
    return _imported and _alone and torch.cuda.is_available() == _has_gpu


_has_gpu, _imported = torch.cuda.is_available(), False
try:
    with mock.patch.object(torch.cuda, "get_device_capability", compute_capability):
        importlib.import_module(MODULE)
    _imported = True
except Exception:  # a process that is not forked says what is wrong
    traceback.print_exc()
_alone = not torch.cuda.is_initialized() and other_threads() <= KNOWN_THREADS
