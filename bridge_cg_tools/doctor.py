"""What the plugin finds on this machine and what to do about it."""

import ctypes
import importlib
import importlib.metadata
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.upstream.environment import WATCHDOG_MINUTES

PACKAGES = (
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "nvidia-cudnn-frontend",
    "triton",
    "wrapt",
)
GROUP = "torch.backends"
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
VARIABLES = (
    plugin.SWITCH,
    WATCHDOG_MINUTES,
    TORCH_AUTOLOAD,
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_GRAPH_REGISTER",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
)
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        what: What was found.
        remedy: What to do about it.
    """

    what: str
    remedy: str


@dataclass(slots=True)
class Diagnosis:
    """Findings of one run.

    Attributes:
        versions: Package -> version, None where it is not installed.
        known_release: Whether the plugin was checked against this series of megatron-bridge.
        entry_points: This plugin's entry points that load with PyTorch.
        active: Whether the plugin is on in this process.
        features: Feature -> state ("ready", "partly", "not available", "off"), the broken seams that it needs, and the
            classes of model providers that it does not work for where it works for others.
        seams: Seam -> state ("active", "native", "broken", "off", "waiting"), reason, purpose, place and features.
        gpu: Facts of the GPU, its driver and libraries; None without one.
        environment: Variables that matter for graphs and are set.
        problems: What is wrong, each with what to do.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    known_release: bool = False
    entry_points: list[str] = field(default_factory=list)
    active: bool = False
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    seams: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpu: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def diagnose(wants_gpu: bool = True) -> Diagnosis:
    """Look at versions, entry points, seams, GPU and environment. Imports the upstream modules that are patched.

    Args:
        wants_gpu: Whether it is a problem that there is no GPU.
    """
    found = Diagnosis()
    found.versions = {name: _version(name) for name in PACKAGES}
    found.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found.entry_points = [
        entry.value for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == bridge_cg_plugin.__name__
    ]
    missing = [name for name in ("torch", "megatron-core", "megatron-bridge") if found.versions[name] is None]
    if missing:
        found.problems.append(Problem(f"{', '.join(missing)} not installed", "install requirements/stack.txt"))
    else:
        _look_at_autoload(found)
        _look_at_seams(found)
    if found.versions["torch"] is not None:
        _look_at_gpu(found, wants_gpu)
    _look_at_environment(found)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_autoload(found: Diagnosis) -> None:
    import torch  # noqa: F401  loads the entry point, as every training process does

    found.active = plugin.status()["active"]
    if not found.entry_points:
        found.problems.append(Problem("the plugin is not installed, so it does not load itself", "pip install it"))
    if found.environment.get(TORCH_AUTOLOAD) == "0":
        found.problems.append(
            Problem(f"{TORCH_AUTOLOAD}=0: PyTorch loads no plugins", "unset it or call bridge_cg_plugin.activate()")
        )
    if not found.active:
        found.problems.append(
            Problem("the plugin is off", f"unset {plugin.SWITCH} or call bridge_cg_plugin.activate()")
        )


def _look_at_seams(found: Diagnosis) -> None:
    from bridge_cg_plugin.upstream.seams.activation import seam_states
    from bridge_cg_plugin.upstream.seams.features import feature_states, features_of
    from bridge_cg_plugin.upstream.seams.registry import SEAMS
    from bridge_cg_plugin.upstream.seams.releases import RELEASES, is_known

    for name in dict.fromkeys(seam.module for seam in SEAMS if seam.packaged and seam.patched_by):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                found.problems.append(Problem(f"{name} does not import: {error}", "install what is missing"))
    states = seam_states()
    found.seams = {
        name: {
            "state": s.state,
            "reason": s.reason,
            "purpose": s.seam.purpose,
            "place": s.seam.place,
            "features": list(s.seam.features),
        }
        for name, s in states.items()
    }
    broken = {name: s for name, s in states.items() if s.state == "broken"}
    found.features = {feature.value: asdict(state) for feature, state in feature_states(broken, found.active).items()}
    release = found.versions["megatron-bridge"]
    found.known_release = is_known(release or "")
    table = ", ".join(r.bridge for r in RELEASES)
    found.problems += [
        Problem(
            f"seam {name} does not fit megatron-bridge {release}: {s.reason}",
            f"not available: {features_of(s.seam)}. Runs that ask for one of these are refused, others train; "
            f"use a release of the version table ({table}), or port the seam",
        )
        for name, s in broken.items()
    ]


def _look_at_gpu(found: Diagnosis, wanted: bool) -> None:
    import torch

    if not torch.cuda.is_available():
        if wanted:
            found.problems.append(
                Problem(
                    "no NVIDIA GPU is visible: graphs are captured on one", "--no-gpu where that is as it should be"
                )
            )
        return
    properties = torch.cuda.get_device_properties(0)
    found.gpu = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        "driver": _driver(),
        "driver_cuda": _driver_cuda(),
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
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


def _look_at_environment(found: Diagnosis) -> None:
    from bridge_cg_plugin.options import OptionError
    from bridge_cg_plugin.upstream.environment import check_process

    try:
        check_process()
    except OptionError as error:
        what, _, remedy = str(error).rpartition(". ")
        found.problems.append(Problem(what, remedy))


def _features(found: Diagnosis) -> list[str]:
    """Return a line for each feature: whether it works, and what stands in its way."""
    lines = ["features"]
    for name, feature in found.features.items():
        models = f" (not for {', '.join(feature['models'])})" if feature["models"] else ""
        because = f": seam {', '.join(feature['seams'])}" if feature["seams"] else ""
        lines.append(f"  {feature['state']:13} {name}{models}{because}")
    return lines


def render(found: Diagnosis) -> str:
    """Return the findings as text."""
    lines = ["versions"]
    lines += [f"  {name:22} {version or 'not installed'}" for name, version in found.versions.items()]
    if not found.known_release:
        lines.append("  this megatron-bridge is not in the version table: what fits is used, what does not is refused")
    lines.append(f"plugin {'on' if found.active else 'off'}, entry points: {', '.join(found.entry_points) or 'none'}")
    lines += _features(found)
    lines.append("seams")
    for name, seam in sorted(found.seams.items()):
        lines.append(f"  {seam['state']:8} {name:34} {seam['reason'] or seam['purpose']}")
    lines.append(f"GPU: {', '.join(f'{k} {v}' for k, v in found.gpu.items()) if found.gpu else 'none'}")
    lines.append(f"environment: {found.environment or 'nothing that matters is set'}")
    lines.append("problems" if found.problems else "no problems")
    lines += [f"  {problem.what}\n    -> {problem.remedy}" for problem in found.problems]
    return "\n".join(lines)
