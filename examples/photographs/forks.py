"""Training processes forked from a server that imported the libraries below the stack, two thirds of all imports.

Importing takes each process some twenty seconds, and minutes where ten do it at once. The server cannot import Bridge
itself: with it come modelopt and flash-linear-attention, which ask the device for its properties while they are
imported, and a process in which CUDA has begun cannot be forked. `libraries.py` is what the server imports; it looks
whether it may be forked after that, and what is forked from it tells.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

MODULE = "examples.photographs.libraries"
# torch.cuda.is_available() begins CUDA where it does not ask NVML. OpenMP's threads would not be there after a fork.
# Inductor reads how many processes compile while it is imported.
SERVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
CUDA_ERROR_NOT_INITIALIZED = 3
PROCESS = Path("/proc/self")


def start_server(environment: Mapping[str, str]) -> None:
    """Start the server, which imports in the background; where this process has a server already, that stays.

    Args:
        environment: Its variables. Those that libraries read while they are imported hold for all that is forked.
    """
    forkserver.set_forkserver_preload([MODULE])
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update({**environment, **SERVER, "PYTHONPATH": os.pathsep.join(sys.path)})
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def obstacle() -> str | None:
    """Return why this process may not be forked, in words; None where it may."""
    if driver_began():
        return "CUDA has begun in their server"
    native = len(list((PROCESS / "task").iterdir())) - 1
    if native:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return f"{native} threads run in their server beside the main one; of Python's: {', '.join(names) or 'none'}"
    return None


def driver_began() -> bool:
    """Whether CUDA's driver was initialized in this process, by whomever; it is not by this question."""
    if "libcuda.so" not in (PROCESS / "maps").read_text():
        return False
    count = ctypes.c_int()
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != CUDA_ERROR_NOT_INITIALIZED
