"""What PyTorch finds on this machine. Run as a program, it is a process of its own, which a broken library may end."""

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
_MARK, _BEGINS = "BRIDGE_CG_PROBE ", "BRIDGE_CG_IMPORTS "


class ProbeError(Exception):
    """PyTorch cannot be asked; the message says why."""


class SlowError(ProbeError):
    """PyTorch takes too long to import."""


# What upstream imports beside PyTorch, and a broken installation does not give.
LIBRARIES = ("transformer_engine.pytorch", "triton", "transformers", "omegaconf", "hydra")

Started = subprocess.Popen[str] | None


def start() -> Started:
    """Start looking in a process of its own; None where this process has PyTorch already."""
    return None if "torch" in sys.modules else _started("main")


def start_importing() -> subprocess.Popen[str]:
    """Start importing `LIBRARIES` in a process of its own."""
    return _started("import_libraries")


def _started(function: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import {function} as run; run()"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(started: Started, seconds: float) -> dict[str, Any]:
    """Return what `look` does.

    Args:
        started: What `start` returned.
        seconds: How long to wait for it.

    Raises:
        SlowError: PyTorch takes longer.
        ProbeError: PyTorch does not import.
    """
    return look() if started is None else told(started, seconds)


def told(started: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Return what a process of this module prints.

    Args:
        started: The process.
        seconds: How long to wait for it.

    Raises:
        SlowError: It takes longer.
        ProbeError: It ended without a result.
    """
    try:
        out, err = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
        raise SlowError(f"it did not import within {seconds:.0f} s") from None
    for line in out.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    if begun := [line.removeprefix(_BEGINS) for line in out.splitlines() if line.startswith(_BEGINS)]:
        raise ProbeError(f"{begun[-1]} ended the process that imported it, with status {started.returncode}")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    lines = [line for line in lines if line.startswith("what():")] or lines  # of C++, before its stack
    raise ProbeError(lines[-1] if lines else f"its process ended with status {started.returncode}")


def main() -> None:
    """Print what `look` returns as one line."""
    _tell(look())


def import_libraries() -> None:
    """Import each library that is installed, beside PyTorch as upstream does; prints which raise what."""
    importlib.import_module("torch")
    failed = {}
    for name in LIBRARIES:
        try:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                print(f"\n{_BEGINS}{name}", flush=True)
                importlib.import_module(name)
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
    _tell({"failed": failed})


def _tell(found: dict[str, Any]) -> None:
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def look() -> dict[str, Any]:
    """Return whether the plugin is active beside PyTorch, the GPU's facts (None without one), and what failed."""
    import torch

    from bridge_cg_plugin import plugin

    found: dict[str, Any] = {"active": plugin.status()["active"], "gpu": None, "failed": []}
    if torch.cuda.is_available():
        found["gpu"] = {name: _asked(name, fact, found["failed"]) for name, fact in _FACTS.items()}
    return found


def _asked(name: str, fact: Any, failed: list[str]) -> Any:
    """Return a fact; one that a broken library keeps is None and noted."""
    import torch

    try:
        return fact(torch)
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
        return None


def _capability(torch: Any) -> str:
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.major}.{properties.minor}"


_FACTS = {
    "name": lambda torch: torch.cuda.get_device_properties(0).name,
    "count": lambda torch: torch.cuda.device_count(),
    "capability": _capability,
    "memory_gib": lambda torch: round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
    "free_gib": lambda torch: round(torch.cuda.mem_get_info()[0] / 2**30, 1),
    "driver": lambda torch: _driver(),
    "driver_cuda": lambda torch: _driver_cuda(),
    "torch_cuda": lambda torch: torch.version.cuda,
    "cudnn": lambda torch: torch.backends.cudnn.version(),
}


def _driver() -> str | None:
    match = re.search(r"(\d+\.\d+(\.\d+)?)", DRIVER.read_text()) if DRIVER.is_file() else None
    return match.group(1) if match else None


def _driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver runs."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"
