"""What the plugin finds on this machine and what to do about it."""

import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from subprocess import Popen
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.switches import ALLOWED, EXPERT_BOUNDS, PROOF, switched_on
from bridge_cg_plugin.upstream.environment import OPTIONS, RELEASE_MEMORY, check_process, memory_may_leave

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
    PROOF,
    EXPERT_BOUNDS,
    RELEASE_MEMORY,
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
            ("run", "audited" or "unknown") and "reason"; "nearest" is the nearest set, and what was run with it.
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

    def add(self, what: str, remedy: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(what, remedy))


def diagnose(wants_gpu: bool = True, details: bool = False) -> Diagnosis:
    """Look at versions, entry points, seams, GPU and environment. A library that is broken is a problem like others.

    Seams are compared with upstream's sources. PyTorch is imported in a process of its own, unless this one has it.

    Args:
        wants_gpu: Whether it is a problem that there is no GPU.
        details: Whether to wait until Bridge, too, was imported there, which takes most of a minute.
    """
    found = Diagnosis()
    found.versions = {name: _version(name) for name in PACKAGES}
    found.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found.entry_points = [
        entry.value for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == bridge_cg_plugin.__name__
    ]
    started = probe.start() if found.versions["torch"] is not None else None
    missing = [name for name in _NEEDED if found.versions[name] is None]
    if missing:
        found.add(f"{', '.join(missing)} not installed", _INSTALL)
    missing = [name for name in missing if name != "transformer-engine"]  # the others' sources tell the rest
    loads, off = found.environment.get(TORCH_AUTOLOAD, "1") == "1", switched_on(plugin.SWITCH, True) is False
    # On here, or where PyTorch is imported, which takes every other value than 1 as 0.
    has_torch = "torch" in sys.modules
    found.active = plugin.status()["active"] if has_torch else bool(found.entry_points) and loads and not off
    if not missing:
        _guarded(found, "the comparison with upstream's sources", lambda: _look_at_seams(found))
    _guarded(found, "looking for encoders", lambda: _look_at_encoders(found))
    if started is not None:
        waits = WAIT_WITH_DETAILS if details else WAIT
        _guarded(found, "PyTorch", lambda: _look_at_torch(found, started, waits, wants_gpu))
    if not missing:
        _look_at_autoload(found, loads, off)
    _look_at_environment(found)
    return found


_NEEDED = ("torch", "megatron-core", "megatron-bridge", "transformer-engine")
_INSTALL = "install the stack into this environment: pip install 'bridge-cg-plugin[stack]'"


def _guarded(found: Diagnosis, what: str, look: Callable[[], None]) -> None:
    """Look at something; what a broken library raises is a problem."""
    try:
        look()
    except Exception as error:
        said = str(error) if isinstance(error, probe.ProbeError) else f"{type(error).__name__}: {error}"
        found.add(f"{what} does not work: {said}", _remedy(said))


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


def _look_at_torch(found: Diagnosis, started: Popen[str], seconds: float, wants_gpu: bool) -> None:
    here = "torch" in sys.modules
    try:
        facts = probe.told(started, seconds)
    except probe.SlowError:
        if wants_gpu and not here:
            raise
        facts = {}
    for name, said in facts.get("libraries", {}).items():
        found.add(f"{name} does not import: {said}", _remedy(said))
    if old := facts.get("old_cudnn"):
        what = f"Transformer Engine runs this system's cuDNN {old[0]}, older than PyTorch's {old[1]}"
        # Both: with one alone two versions mix, and it attends without cuDNN.
        found.add(what, f"export CUDNN_HOME={old[2]} LD_LIBRARY_PATH={old[2]}/lib:$LD_LIBRARY_PATH")
    facts = probe.look() if here else facts
    if not facts:
        return
    found.active, found.gpu = facts["active"], facts["gpu"]
    for what in facts["failed"]:
        found.add(f"PyTorch cannot tell {what}", _remedy(what))
    if found.gpu is None and wants_gpu:
        found.add("PyTorch sees no NVIDIA GPU, and graphs are captured on one", "pass --no-gpu if there is none")


def _look_at_autoload(found: Diagnosis, loads: bool, off: bool) -> None:
    if not found.entry_points:
        found.add("the plugin is not installed, so it does not load itself", "pip install it")
    if not loads:
        what = f"{TORCH_AUTOLOAD}={found.environment[TORCH_AUTOLOAD]}: PyTorch loads no plugins"
        found.add(what, "unset it or call bridge_cg_plugin.activate()")
    if not found.active and (loads or off):
        found.add("the plugin is off", f"unset {plugin.SWITCH} or call bridge_cg_plugin.activate()")


def _look_at_seams(found: Diagnosis) -> None:
    from bridge_cg_plugin.upstream.seams.seam import RELEASES, is_known, too_old
    from bridge_cg_plugin.upstream.seams.states import (
        combination_status,
        feature_states,
        lost_with,
        nearest_set,
        seam_states,
    )

    release = found.versions["megatron-bridge"] or ""
    found.known_release = is_known(release, found.versions["megatron-core"] or "")
    if why := too_old(release):
        what, _, remedy = why.partition(": ")
        found.add(f"{what}, so the plugin stays off", remedy)
        return
    if found.active:
        bridge_cg_plugin.activate()
    states = seam_states()
    for name, one in states.items():
        facts = {"purpose": one.seam.purpose, "place": one.seam.place, "features": list(one.seam.features)}
        found.seams[name] = {"state": one.state, "reason": one.reason, **facts}
    broken = {name: one for name, one in states.items() if one.state == "broken"}
    found.features = {str(feature): asdict(state) for feature, state in feature_states(broken, found.active).items()}
    combination = combination_status(found.versions)
    nearest = nearest_set(found.versions)
    found.combination = {"state": combination.state, "reason": combination.reason, "nearest": nearest}
    table = ", ".join(r.bridge for r in RELEASES)
    for name, one in broken.items():
        refused = "Graphs run" if one.seam.instead else "Runs that ask for one of these are refused, others train"
        found.add(
            f"seam {name} does not fit megatron-bridge {release}: {one.reason}",
            f"not available: {lost_with(one.seam)}. {refused}; "
            f"use a release of the version table ({table}), or port the seam",
        )


def _look_at_encoders(found: Diagnosis) -> None:
    from bridge_cg_plugin.upstream.seams.encoders import taken_encoders

    mine, others = taken_encoders()
    found.encoders = {"built_in": list(mine), "others": others}


def _look_at_environment(found: Diagnosis) -> None:
    from bridge_cg_plugin.options import OptionError
    from bridge_cg_plugin.options.normalization import normalize

    if switched_on(plugin.SWITCH, True) is None:
        what = f"{plugin.SWITCH}={os.environ[plugin.SWITCH]!r} is no switch, so the plugin stays on"
        found.add(what, f"set it to {ALLOWED}")
    for check in (check_process, memory_may_leave, lambda: normalize(os.environ.get(OPTIONS, ""))):
        try:
            check()
        except OptionError as error:
            what, _, remedy = str(error).rpartition(". ")
            found.add(what, remedy)


def render(found: Diagnosis, details: bool = False) -> str:
    """Return the findings as text: the verdict, what to do, a summary, and the details on request."""
    count = len(found.problems)
    fine = "ready: no problems" if found.gpu else "no problems, but no GPU to capture graphs on"
    if found.combination.get("state") == "unknown":
        fine = f"not tested with these releases: {found.combination['reason']}. Nothing else is wrong"
    lines = [f"{count} problem{'s' if count > 1 else ''}" if count else fine]
    if found.seams and not found.known_release:
        lines[0] += "; this release is not in the version table: what fits is used. bridge-cg audit compares it"
    lines += [line for problem in found.problems for line in (f"  {problem.what}", f"    -> {problem.remedy}")]
    lines += ["", *_summary(found)]
    lines += _details(found) if details else ["bridge-cg doctor --details names every seam"]
    return "\n".join(wrapped(*lines))


def _summary(found: Diagnosis) -> Iterator[str]:
    yield f"versions: {', '.join(f'{name} {version or "not installed"}' for name, version in found.versions.items())}"
    if found.combination:
        verb = "is" if found.combination["state"] == "unknown" else "was"
        yield f"  this combination {verb} {found.combination['state']}: {found.combination['reason']}"
        yield f"  nearest set: {found.combination['nearest']}"
    yield f"plugin {'on' if found.active else 'off'}, entry points: {', '.join(found.entry_points) or 'none'}"
    yield f"GPU: {', '.join(f'{k} {v}' for k, v in found.gpu.items()) if found.gpu else 'none'}"
    variables = ", ".join(f"{name}={value}" for name, value in found.environment.items())
    yield f"environment: {variables or 'nothing that matters is set'}"
    other = [f"{name} ({one['state']})" for name, one in found.features.items() if one["state"] != "ready"]
    yield f"features: {len(found.features) - len(other)} of {len(found.features)} ready"
    if other:
        yield f"  not ready: {', '.join(other)}"
    others = [f"{provider} by {adapter}" for provider, adapter in found.encoders.get("others", {}).items()]
    yield f"encoders that graphs take: {', '.join(found.encoders.get('built_in', ())) or 'not read'}"
    yield f"  of other packages: {', '.join(others) or 'none'}; bridge-cg explain RECIPE names a recipe's"
    states = sorted(Counter(seam["state"] for seam in found.seams.values()).items())
    yield f"seams: {', '.join(f'{number} {state}' for state, number in states) or 'not read'}"


def _details(found: Diagnosis) -> Iterator[str]:
    yield from ("", "features")
    for name, feature in found.features.items():
        models = f" (not for {', '.join(feature['models'])})" if feature["models"] else ""
        because = f": seam {', '.join(feature['seams'])}" if feature["seams"] else ""
        yield f"  {feature['state']:13} {name}{models}{because}"
    yield "seams"
    for name, seam in sorted(found.seams.items()):
        yield f"  {seam['state']:8} {name:34} {seam['reason'] or seam['purpose']}"
