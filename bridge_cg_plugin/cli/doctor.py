"""What the plugin finds on this machine and what to do about it."""

import importlib
import importlib.metadata
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from subprocess import Popen
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.switches import ALLOWED, switched_on
from bridge_cg_plugin.upstream.environment import (
    OPTIONS,
    RELEASE_MEMORY,
    WATCHDOG_MINUTES,
    check_process,
    memory_may_leave,
)

from . import probe
from .answers import wrapped

PACKAGES = (
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "nvidia-cudnn-frontend",
    "transformers",
    "triton",
    "wrapt",
)
GROUP = "torch.backends"
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
VARIABLES = (
    plugin.SWITCH,
    OPTIONS,
    RELEASE_MEMORY,
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
# How long PyTorch may take to import, in seconds; with details it has more.
WAIT, WAIT_WITH_DETAILS = 8.0, 120.0


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
        combination: What Bridge, megatron-core and Transformer Engine of these versions were checked with: "state"
            ("run", "audited" or "unknown") and "reason".
        encoders: "built_in": the models whose encoders graphs take; "others": provider -> adapter, of other packages.
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
    combination: dict[str, str] = field(default_factory=dict)
    encoders: dict[str, Any] = field(default_factory=dict)
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


def diagnose(wants_gpu: bool = True, details: bool = False) -> Diagnosis:
    """Look at versions, entry points, seams, GPU and environment. A library that is broken is a problem like others.

    Seams are compared with upstream's sources. PyTorch is imported in a process of its own, unless this one has it.

    Args:
        wants_gpu: Whether it is a problem that there is no GPU.
        details: Whether to import the upstream modules that are patched too, which takes most of a minute.
    """
    found = Diagnosis()
    found.versions = {name: _version(name) for name in PACKAGES}
    found.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found.entry_points = [
        entry.value for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == bridge_cg_plugin.__name__
    ]
    started = probe.start() if found.versions["torch"] is not None else None
    importing = probe.start_importing() if started is not None else None
    missing = [name for name in _NEEDED if found.versions[name] is None]
    if missing:
        found.problems.append(Problem(f"{', '.join(missing)} not installed", _INSTALL))
    missing = [name for name in missing if name != "transformer-engine"]  # the others' sources tell the rest
    found.active = _loads_itself(found)
    if not missing:
        _guarded(found, "the comparison with upstream's sources", lambda: _look_at_seams(found, details))
    _guarded(found, "looking for encoders", lambda: _look_at_encoders(found))
    if found.versions["torch"] is not None:
        waits = WAIT_WITH_DETAILS if details else WAIT
        ends = time.monotonic() + waits
        works = _guarded(found, "PyTorch", lambda: _look_at_torch(found, started, waits, wants_gpu))
        if importing is not None and works:
            _guarded(
                found, "importing libraries", lambda: _look_at_libraries(found, importing, ends - time.monotonic())
            )
        elif importing is not None:  # it ends where PyTorch does
            importing.kill()
            importing.communicate()
    if not missing:
        _look_at_autoload(found)
    _look_at_environment(found)
    return found


_NEEDED = ("torch", "megatron-core", "megatron-bridge", "transformer-engine")
_INSTALL = "install the stack into this environment: pip install 'bridge-cg-plugin[stack]'"


def _guarded(found: Diagnosis, what: str, look: Callable[[], None]) -> bool:
    """Look at something; what a broken library raises is a problem. Returns whether it worked."""
    try:
        look()
        return True
    except Exception as error:
        said = str(error) if isinstance(error, probe.ProbeError) else f"{type(error).__name__}: {error}"
        found.problems.append(Problem(f"{what} does not work: {said}", _remedy(said)))
        return False


def _remedy(said: str) -> str:
    if "did not import within" in said:
        return "run bridge-cg doctor --details, which waits longer, or look at the load of this machine"
    if "AllocatorConfig" in said:
        return "correct or unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF: name:value,name:value"
    library = "cudnn" in said.lower() or "cannot open shared object" in said
    return "install the library that is missing, as the message names it" if library else "reinstall what it names"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # absent, or its metadata cannot be read
        return None


def _loads_itself(found: Diagnosis) -> bool:
    """Whether the plugin is on here, or will be where PyTorch is imported."""
    if "torch" in sys.modules:
        return bool(plugin.status()["active"])
    off = switched_on(plugin.SWITCH, True) is False
    return bool(found.entry_points) and _pytorch_loads_plugins(found) and not off


def _pytorch_loads_plugins(found: Diagnosis) -> bool:
    return found.environment.get(TORCH_AUTOLOAD, "1") == "1"  # PyTorch takes every other value as 0


def _look_at_torch(found: Diagnosis, started: probe.Started, seconds: float, wants_gpu: bool) -> None:
    try:
        facts = probe.result(started, seconds)
    except probe.SlowError:
        if wants_gpu:
            raise
        return
    found.active, found.gpu = facts["active"], facts["gpu"]
    found.problems += [Problem(f"PyTorch cannot tell {what}", _remedy(what)) for what in facts["failed"]]
    if found.gpu is None and wants_gpu:
        found.problems.append(
            Problem("PyTorch sees no NVIDIA GPU, and graphs are captured on one", "pass --no-gpu if there is none")
        )


def _look_at_libraries(found: Diagnosis, importing: Popen[str], seconds: float) -> None:
    """Note the libraries that do not import. That PyTorch takes long was said.

    Raises:
        ProbeError: One of them ended the process.
    """
    try:
        failed = probe.told(importing, seconds)["failed"]
    except probe.SlowError:
        return
    for name, said in failed.items():
        found.problems.append(Problem(f"{name} does not import: {said}", _remedy(said)))


def _look_at_autoload(found: Diagnosis) -> None:
    if not found.entry_points:
        found.problems.append(Problem("the plugin is not installed, so it does not load itself", "pip install it"))
    loads = _pytorch_loads_plugins(found)
    if not loads:
        what = f"{TORCH_AUTOLOAD}={found.environment[TORCH_AUTOLOAD]}: PyTorch loads no plugins"
        found.problems.append(Problem(what, "unset it or call bridge_cg_plugin.activate()"))
    if not found.active and (loads or switched_on(plugin.SWITCH, True) is False):
        found.problems.append(
            Problem("the plugin is off", f"unset {plugin.SWITCH} or call bridge_cg_plugin.activate()")
        )


def _import_what_is_patched(found: Diagnosis) -> None:
    from bridge_cg_plugin.upstream.seams.registry import SEAMS

    for name in dict.fromkeys(seam.module for seam in SEAMS if seam.packaged and seam.touch == "patched"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                found.problems.append(Problem(f"{name} does not import: {error}", "install what is missing"))
        except Exception as error:
            what = f"{name} does not import: {type(error).__name__}: {error}"
            found.problems.append(Problem(what, _remedy(what)))


def _look_at_seams(found: Diagnosis, imports: bool) -> None:
    from bridge_cg_plugin.upstream.seams.activation import seam_states
    from bridge_cg_plugin.upstream.seams.features import feature_states, features_of
    from bridge_cg_plugin.upstream.seams.releases import RELEASES, is_known, too_old
    from bridge_cg_plugin.upstream.seams.states import combination_status

    release = found.versions["megatron-bridge"] or ""
    found.known_release = is_known(release)
    if why := too_old(release):
        what, _, remedy = why.partition(": ")
        found.problems.append(Problem(f"{what}, so the plugin stays off", remedy))
        return
    if imports:
        _import_what_is_patched(found)
    elif found.active:
        bridge_cg_plugin.activate()
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
    found.features = {str(feature): asdict(state) for feature, state in feature_states(broken, found.active).items()}
    combination = combination_status(found.versions)
    found.combination = {"state": combination.state, "reason": combination.reason}
    table = ", ".join(r.bridge for r in RELEASES)
    found.problems += [
        Problem(
            f"seam {name} does not fit megatron-bridge {release}: {s.reason}",
            f"not available: {features_of(s.seam)}. Runs that ask for one of these are refused, others train; "
            f"use a release of the version table ({table}), or port the seam",
        )
        for name, s in broken.items()
    ]


def _look_at_encoders(found: Diagnosis) -> None:
    from bridge_cg_plugin.upstream.seams.encoders import taken_encoders

    mine, others = taken_encoders()
    found.encoders = {"built_in": list(mine), "others": others}


def _look_at_environment(found: Diagnosis) -> None:
    from bridge_cg_plugin.options import OptionError
    from bridge_cg_plugin.options.normalization import normalize

    if switched_on(plugin.SWITCH, True) is None:
        what = f"{plugin.SWITCH}={os.environ[plugin.SWITCH]!r} is no switch, so the plugin stays on"
        found.problems.append(Problem(what, f"set it to {ALLOWED}"))
    for check in (check_process, memory_may_leave, lambda: normalize(os.environ.get(OPTIONS, ""))):
        try:
            check()
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


def render(found: Diagnosis, details: bool = False) -> str:
    """Return the findings as text: the verdict, what to do, a summary, and the details on request."""
    count = len(found.problems)
    fine = "ready: no problems" if found.gpu else "no problems, but no GPU to capture graphs on"
    lines = [f"{count} problem{'s' if count > 1 else ''}" if count else fine]
    lines += [line for problem in found.problems for line in (f"  {problem.what}", f"    -> {problem.remedy}")]
    lines += ["", *_summary(found)]
    lines += _details(found) if details else ["bridge-cg doctor --details names every seam"]
    return "\n".join(line for text in lines for line in wrapped(text))


def _summary(found: Diagnosis) -> list[str]:
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.versions.items())
    lines = [f"versions: {versions}"]
    if found.combination:
        verb = "is" if found.combination["state"] == "unknown" else "was"
        lines.append(f"  this combination {verb} {found.combination['state']}: {found.combination['reason']}")
    if found.seams and not found.known_release:
        lines.append("  this megatron-bridge is not in the version table: what fits is used, what does not is refused")
    lines.append(f"plugin {'on' if found.active else 'off'}, entry points: {', '.join(found.entry_points) or 'none'}")
    lines.append(f"GPU: {', '.join(f'{k} {v}' for k, v in found.gpu.items()) if found.gpu else 'none'}")
    lines.append(f"environment: {found.environment or 'nothing that matters is set'}")
    ready = sum(feature["state"] == "ready" for feature in found.features.values())
    lines.append(f"features: {ready} of {len(found.features)} ready")
    other = [f"{name} ({one['state']})" for name, one in found.features.items() if one["state"] != "ready"]
    lines += [f"  not ready: {', '.join(other)}"] if other else []
    lines += _encoders(found)
    states = Counter(seam["state"] for seam in found.seams.values())
    lines.append(f"seams: {', '.join(f'{number} {state}' for state, number in sorted(states.items())) or 'not read'}")
    return lines


def _encoders(found: Diagnosis) -> list[str]:
    """Return which encoders graphs take."""
    others = [f"{provider} by {adapter}" for provider, adapter in found.encoders.get("others", {}).items()]
    return [
        f"encoders that graphs take: {', '.join(found.encoders.get('built_in', ())) or 'not read'}",
        f"  of other packages: {', '.join(others) or 'none'}; bridge-cg explain RECIPE names a recipe's",
    ]


def _details(found: Diagnosis) -> list[str]:
    lines = ["", *_features(found), "seams"]
    for name, seam in sorted(found.seams.items()):
        lines.append(f"  {seam['state']:8} {name:34} {seam['reason'] or seam['purpose']}")
    return lines
