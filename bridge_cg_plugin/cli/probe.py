"""What PyTorch and upstream's libraries do here, asked in a process of its own, which a broken library may end."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
ENGINE = "transformer_engine.pytorch"
# What upstream imports beside PyTorch, and a broken installation does not give.
LIBRARIES = (ENGINE, "triton", "transformers", "omegaconf", "hydra", "megatron.bridge")
# Packages with the cuDNN that PyTorch's wheels bring.
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_MARK, _BEGINS = "BRIDGE_CG_PROBE ", "BRIDGE_CG_IMPORTS "


class ProbeError(Exception):
    """PyTorch cannot be asked; the message says why."""


class SlowError(ProbeError):
    """PyTorch takes too long to import."""


def start(code: str = f"from {__name__} import main; main()") -> subprocess.Popen[str]:
    """Start asking in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(started: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Return what `look` does, and of `import_libraries` what there was time for.

    Args:
        started: What `start` returned.
        seconds: How long to wait for it.

    Raises:
        SlowError: PyTorch takes longer.
        ProbeError: PyTorch does not import.
    """
    late = False
    try:
        out, err = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        started.kill()
        out, err = started.communicate()
    lines = out.splitlines()
    found: dict[str, Any] = {}
    for line in lines:
        found |= json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else {}
    if not found and late:
        raise SlowError(f"it did not import within {seconds:.0f} s")
    if not found:
        errors = [line.strip() for line in err.splitlines() if line.strip()]
        errors = [line for line in errors if line.startswith("what():")] or errors  # of C++, before its stack
        raise ProbeError(errors[-1] if errors else f"its process ended with status {started.returncode}")
    begun = [line.removeprefix(_BEGINS) for line in lines if line.startswith(_BEGINS)]
    if begun and not late and started.returncode:
        ended = f"it ended the process that imported it, with status {started.returncode}"
        return {**found, "libraries": {**found.get("libraries", {}), begun[-1]: ended}}
    return found


def main() -> None:
    """Print what `look` returns as one line, and each fact of `import_libraries`."""
    print(f"\n{_MARK}{json.dumps(look())}", flush=True)
    for fact in import_libraries():
        print(f"\n{_MARK}{json.dumps(fact)}", flush=True)


def import_libraries() -> Iterator[dict[str, Any]]:
    """Import each library that is installed, beside PyTorch as upstream does; yields facts that show by that."""
    failed = {}
    for name in LIBRARIES:
        fact: dict[str, Any] = {}
        try:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                print(f"\n{_BEGINS}{name}", flush=True)
                importlib.import_module(name)
                fact = {"old_cudnn": old_cudnn()} if name == ENGINE else {}
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
            fact = {"libraries": failed}
        yield fact


def old_cudnn() -> list[str]:
    """Return which cuDNN Transformer Engine has loaded, and version and folder of PyTorch's own if that is newer."""
    from bridge_cg_plugin.upstream.kernels.transformer_engine import engine_cudnn

    installed, runs = [d for d in distributions() if d.metadata["Name"] in CUDNN], engine_cudnn()
    newer = [d for d in installed if tuple(map(int, d.version.split(".")[:3])) > runs]
    return [".".join(map(str, runs)), newer[0].version, str(newer[0].locate_file("nvidia/cudnn"))] if newer else []


def look() -> dict[str, Any]:
    """Return whether the plugin is active beside PyTorch, the GPU's facts (None without one), and what failed."""
    import torch

    from bridge_cg_plugin import plugin

    found: dict[str, Any] = {"active": plugin.status()["active"], "gpu": None, "failed": []}
    if not torch.cuda.is_available():
        return found
    found["gpu"] = {}
    for name, fact in _FACTS.items():
        try:
            found["gpu"][name] = fact(torch)
        except Exception as error:  # a broken library keeps it
            found["gpu"][name] = None
            found["failed"].append(f"{name}: {type(error).__name__}: {error}")
    return found


def _driver() -> str | None:
    match = re.search(r"(\d+\.\d+(\.\d+)?)", DRIVER.read_text()) if DRIVER.is_file() else None
    return match.group(1) if match else None


_FACTS = {
    "name": lambda torch: torch.cuda.get_device_properties(0).name,
    "count": lambda torch: torch.cuda.device_count(),
    "capability": lambda torch: "{0.major}.{0.minor}".format(torch.cuda.get_device_properties(0)),
    "memory_gib": lambda torch: round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
    "free_gib": lambda torch: round(torch.cuda.mem_get_info()[0] / 2**30, 1),
    "driver": lambda torch: _driver(),
    "torch_cuda": lambda torch: torch.version.cuda,
}
