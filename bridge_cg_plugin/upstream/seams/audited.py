"""What a combination of upstream releases was checked with: tests, an audit of its sources, or nothing."""

import functools
import importlib.resources
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .features import feature_states
from .releases import RELEASES, RUN_ONCE, Release

BRIDGE, CORE, TRANSFORMER_ENGINE, TRANSFORMERS = (
    "megatron-bridge",
    "megatron-core",
    "transformer-engine",
    "transformers",
)


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
        if found.items() <= _packages(release).items():
            return CombinationStatus("run", release.tests)
    return _audited({name: version.partition("+")[0] for name, version in found.items()})


def lost_features(drift: Collection[str]) -> tuple[str, ...]:
    """Return the features that do not work, or not for every model, where these seams drifted."""
    return tuple(str(name) for name, feature in feature_states(drift).items() if feature.state != "ready")


def _packages(release: Release) -> dict[str, str]:
    return {
        BRIDGE: release.bridge,
        CORE: release.core,
        TRANSFORMER_ENGINE: release.transformer_engine,
        TRANSFORMERS: release.transformers,
    }


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
