"""What the plugin finds on this machine and what to do about it."""

import importlib
import importlib.metadata
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from . import plugin

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "triton", "wrapt")
VARIABLES = (
    plugin.SWITCH,
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_GRAPH_REGISTER",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


@dataclass(slots=True)
class Diagnosis:
    """Findings of one run.

    Attributes:
        versions: Package -> version, None where it is not installed.
        entry_points: Names of this plugin's entry points that load with PyTorch.
        active: Whether the plugin is on in this process.
        patches: Patch -> state, reason and purpose.
        gpu: Name, memory in GiB and driver's CUDA version, None without a GPU.
        environment: Variables that matter for graphs and are set.
        problems: What is wrong, each with what to do.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    entry_points: list[str] = field(default_factory=list)
    active: bool = False
    patches: dict[str, dict[str, str]] = field(default_factory=dict)
    gpu: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at versions, entry points, patches, GPU and environment. Imports the upstream modules that are patched."""
    found = Diagnosis()
    found.versions = {name: _version(name) for name in PACKAGES}
    found.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found.entry_points = [
        entry.value for entry in importlib.metadata.entry_points(group="torch.backends") if entry.name == __package__
    ]
    _look_at_patches(found)
    _look_at_gpu(found)
    _look_at_environment(found)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_patches(found: Diagnosis) -> None:
    missing = [name for name in ("torch", "megatron-core", "megatron-bridge") if found.versions[name] is None]
    if missing:
        found.problems.append(f"{', '.join(missing)} not installed: install the stack of requirements/stack.txt")
        return
    if not found.entry_points:
        found.problems.append("the plugin is not installed as a package, so it does not load itself: pip install it")
    import torch  # noqa: F401  loads the entry point, as every training process does

    for name in plugin.PATCHED_MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                found.problems.append(f"{name} does not import: {error}")
    state = plugin.status()
    found.active, found.patches = state["active"], state["patches"]
    if not found.active:
        found.problems.append(f"the plugin is off: unset {plugin.SWITCH} or call bridge_cg_plugin.activate()")
    release = found.versions["megatron-bridge"]
    found.problems += [
        f"patch {name} does not fit megatron-bridge {release}: {reason}; use a release of the version table"
        for name, reason in plugin.broken_patches().items()
    ]


def _look_at_gpu(found: Diagnosis) -> None:
    if found.versions["torch"] is None:
        return
    import torch

    if not torch.cuda.is_available():
        found.problems.append("no NVIDIA GPU is visible: graphs are captured on a GPU only")
        return
    properties = torch.cuda.get_device_properties(0)
    found.gpu = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def _look_at_environment(found: Diagnosis) -> None:
    from .options import OptionError
    from .upstream.environment import check_process

    try:
        check_process()
    except OptionError as error:
        found.problems.append(str(error))


def render(found: Diagnosis) -> str:
    """Return the findings as text."""
    lines = ["versions"]
    lines += [f"  {name:20} {version or 'not installed'}" for name, version in found.versions.items()]
    lines.append(f"plugin {'on' if found.active else 'off'}, entry points: {', '.join(found.entry_points) or 'none'}")
    lines.append("patches")
    for name, patch in sorted(found.patches.items()):
        lines.append(f"  {patch['state']:8} {name:34} {patch['reason'] or patch['purpose']}")
    lines.append(f"GPU: {found.gpu or 'none'}")
    lines.append(f"environment: {found.environment or 'nothing that matters is set'}")
    lines.append("problems" if found.problems else "no problems")
    lines += [f"  {problem}" for problem in found.problems]
    return "\n".join(lines)
