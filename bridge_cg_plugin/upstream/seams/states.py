"""The state of every seam: patches say it themselves, what is relied on is compared with upstream's sources."""

import functools
import importlib.resources
import json
import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from .activation import activate, is_on, loaded_patches
from .features import feature_states
from .patches import Patch, State, bridge_release
from .registry import SEAMS
from .releases import BRIDGE, CORE, RELEASES, RUN_ONCE, TRANSFORMER_ENGINE, TRANSFORMERS
from .seam import Seam, drift
from .source_reader import NoSourceError, SourceReader


class SeamState(NamedTuple):
    """How a seam stands in this process.

    Attributes:
        seam: The seam.
        state: "active" (replaced by the plugin), "native" (upstream's own, as expected), "broken" (not as expected),
            "waiting" (replaced when upstream's module is imported) or "off".
        reason: Why, where that is not obvious.
    """

    seam: Seam
    state: State
    reason: str


def seam_states() -> dict[str, SeamState]:
    """Return the state of every seam by name. Imports nothing of upstream: its sources are read."""
    known, on = {patch.name: patch for patch in loaded_patches()}, is_on()
    installed = installed_states(bridge_release())
    return {s.name: SeamState(s, *_state(s, known.get(s.name), on, *installed[s.name])) for s in SEAMS}


def broken_seams() -> dict[str, str]:
    """Return the seams that do not fit, with what was found.

    First it patches functions again that somebody replaced after the plugin did, like any function of upstream.
    """
    if is_on():
        activate()
    return {name: found.reason for name, found in seam_states().items() if found.state == "broken"}


@functools.cache
def installed_states(release: str) -> dict[str, tuple[State, str]]:
    """Compare every seam with the sources that this process uses; they do not change while it runs."""
    reader = SourceReader()
    return {seam.name: compare(seam, reader, release) for seam in SEAMS}


def _state(seam: Seam, patch: Patch | None, on: bool, state: State, reason: str) -> tuple[State, str]:
    if seam.touch != "patched":
        return state, reason
    if not on:
        return "off", patch.reason if patch is not None else ""
    if seam.module not in sys.modules:
        waits = (state, reason) == ("native", "")
        return ("waiting", f"until {seam.module} is imported") if waits else (state, reason)
    if patch is None or patch.state == "off":
        return "broken", f"the plugin failed to replace {seam.place}; the log says why"
    patch.look()
    if patch.state == "active" and state == "broken":  # behind what was patched, upstream's own is not as expected
        return state, reason
    return patch.state, patch.reason


def compare(seam: Seam, reader: SourceReader, release: str) -> tuple[State, str]:
    """Compare a seam with a release's sources; returns "native", "off" (no source to compare) or "broken", and why."""
    if not seam.packaged:
        return "off", "not in upstream's wheels"
    if not seam.expected_in(release):
        return "native", f"came with megatron-bridge {seam.since}"
    package = seam.module.split(".")
    if not any(reader.has_module(".".join(package[:depth])) for depth in range(2, len(package) + 1)):
        return "off", f"no sources of {'.'.join(package[:2])} here"
    try:
        differences = drift(seam, reader.find(seam))
    except NoSourceError as error:
        return "off", str(error)
    return ("broken", "; ".join(differences)) if differences else ("native", "")


class CombinationStatus(NamedTuple):
    """What a combination of releases was checked with.

    Attributes:
        state: "run" (the plugin's tests ran with it), "audited" (every seam was compared with its sources) or
            "unknown".
        reason: What was run, what the audit found, or which release was not audited.
        drift: Seam -> what differs from what the plugin expects.
        features: Names of features that do not work, or not for every model, because of the drift.
    """

    state: Literal["run", "audited", "unknown"]
    reason: str
    drift: Mapping[str, str] = MappingProxyType({})
    features: tuple[str, ...] = ()


@functools.cache
def audit_record() -> dict[str, Any]:
    """Return what `scripts/audit_releases.py` wrote.

    "audits" has an entry for each pair of Bridge and megatron-core, and for each release of the other packages: its
    "releases" (package -> version), the number of seams "compared", and the "drift" (seam -> what differs).
    """
    record: dict[str, Any] = json.loads(importlib.resources.files(__package__).joinpath("audited.json").read_text())
    return record


def combination_status(versions: Mapping[str, str | None]) -> CombinationStatus:
    """Return what a combination of releases was checked with.

    A build with a local version, as "2.20.2+abc", is at most "audited": its sources may differ from the release's.

    Args:
        versions: Package -> version of "megatron-bridge", "megatron-core", "transformer-engine" and, where it counts,
            "transformers"; None where a package is not installed. Other packages are ignored.
    """
    required = (BRIDGE, CORE, TRANSFORMER_ENGINE)
    absent = [name for name in required if not versions.get(name)]
    if absent:
        return CombinationStatus("unknown", f"not installed: {', '.join(absent)}")
    found = {name: version for name in (*required, TRANSFORMERS) if (version := versions.get(name))}
    for release in (*RELEASES, *RUN_ONCE):
        if found.items() <= release.packages.items():
            return CombinationStatus("run", release.tests)
    return _audited({name: version.partition("+")[0] for name, version in found.items()})


def lost_features(drift: Collection[str]) -> tuple[str, ...]:
    """Return the features that do not work, or not for every model, where these seams drifted."""
    return tuple(str(name) for name, feature in feature_states(drift).items() if feature.state != "ready")


def _audited(found: Mapping[str, str]) -> CombinationStatus:
    entries = []
    for names in ((BRIDGE, CORE), (TRANSFORMER_ENGINE,), (TRANSFORMERS,)):
        wanted = {name: found[name] for name in names if name in found}
        entry = next((e for e in audit_record()["audits"] if e["releases"] == wanted), None)
        if wanted and entry is None:
            words = " with ".join(f"{name} {version}" for name, version in wanted.items())
            return CombinationStatus("unknown", f"{words} was not audited")
        entries += [entry] if entry else []
    drift = {name: difference for entry in entries for name, difference in entry["drift"].items()}
    compared, features = sum(entry["compared"] for entry in entries), lost_features(drift)
    reason = f"{compared - len(drift)} of {compared} seams fit the releases' sources; nothing was run"
    lost = f". Lost: {', '.join(features)}" if features else ""
    return CombinationStatus("audited", reason + lost, drift, features)
