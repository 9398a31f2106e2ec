"""What a combination of upstream releases was checked with: tests, an audit of its sources, or nothing."""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .features import feature_states
from .releases import RELEASES

BRIDGE, CORE, TRANSFORMER_ENGINE = "megatron-bridge", "megatron-core", "transformer-engine"


@dataclass(frozen=True, slots=True)
class CombinationStatus:
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
    drift: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()


@functools.cache
def audit_record() -> dict[str, Any]:
    """Return what `tools/audit_releases.py` wrote: "date", "registry", "pairs" and "transformer_engine"."""
    record: dict[str, Any] = json.loads(importlib.resources.files(__package__).joinpath("audited.json").read_text())
    return record


def combination_status(versions: Mapping[str, str | None]) -> CombinationStatus:
    """Return what a combination of releases was checked with.

    A build with a local version, as "2.20.2+abc", is at most "audited": its sources may differ from the release's.

    Args:
        versions: Package -> version, with "megatron-bridge", "megatron-core" and "transformer-engine"; None or absent
            where a package is not installed. Other packages are ignored.
    """
    found = {name: versions.get(name) for name in (BRIDGE, CORE, TRANSFORMER_ENGINE)}
    absent = [name for name, version in found.items() if not version]
    if absent:
        return CombinationStatus("unknown", f"not installed: {', '.join(absent)}")
    bridge, core, engine = (str(version) for version in found.values())
    for release in RELEASES:
        if (bridge, core, engine) == (release.bridge, release.core, release.transformer_engine):
            return CombinationStatus("run", release.tests)
    return _audited(*(version.partition("+")[0] for version in (bridge, core, engine)))


def lost_features(drift: Mapping[str, str]) -> tuple[str, ...]:
    """Return the features that do not work, or not for every model, where these seams drifted."""
    return tuple(name.value for name, feature in feature_states(drift).items() if feature.state != "ready")


def _audited(bridge: str, core: str, engine: str) -> CombinationStatus:
    record = audit_record()
    pair = next((p for p in record["pairs"] if (p["bridge"], p["core"]) == (bridge, core)), None)
    alone = next((e for e in record["transformer_engine"] if e["release"] == engine), None)
    if pair is None:
        return CombinationStatus("unknown", f"{BRIDGE} {bridge} with {CORE} {core} was not audited")
    if alone is None:
        return CombinationStatus("unknown", f"{TRANSFORMER_ENGINE} {engine} was not audited")
    drift = {**pair["drift"], **alone["drift"]}
    compared = pair["compared"] + alone["compared"]
    features = lost_features(drift)
    reason = f"{compared - len(drift)} of {compared} seams fit the releases' sources; nothing was run"
    lost = f". Lost: {', '.join(features)}" if features else ""
    return CombinationStatus("audited", reason + lost, drift, features)
