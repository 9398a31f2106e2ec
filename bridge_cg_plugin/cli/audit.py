"""Whether a release of upstream looks as the plugin expects, by its files, not imported, or by the record of audits."""

import functools
import importlib.resources
import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bridge_cg_plugin.upstream import seams
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import (
    BRIDGE,
    CONTAINERS,
    CORE,
    NEWEST,
    RELEASES,
    RUN_ONCE,
    TRANSFORMER_ENGINE,
    TRANSFORMERS,
    is_known,
    minor,
    too_old,
)
from bridge_cg_plugin.upstream.seams.source_reader import (
    ReadModule,
    SourceReader,
    from_folders,
    installed,
)
from bridge_cg_plugin.upstream.seams.states import compare, feature_states, lost_with

INSTALLED = "installed"
_DISTRIBUTION = re.compile(r"megatron_(bridge|core)-([^/-]+)\.dist-info")


class AuditError(Exception):
    """An argument cannot be audited; the message says why."""


@dataclass(slots=True)
class Audit:
    """What an audit found.

    Attributes:
        versions: "bridge" and "core" -> version, as far as the files say.
        known: Whether the plugin was checked against this series of releases.
        fits: Names of seams that are as expected.
        drift: Seam -> what differs, what the plugin wants there, and what is lost with it.
        features: Feature -> its state, the drifted seams that it needs, and the classes of model providers concerned.
        not_compared: Seam -> why it could not be compared.
    """

    versions: dict[str, str] = field(default_factory=dict)
    known: bool = False
    fits: list[str] = field(default_factory=list)
    drift: dict[str, dict[str, Any]] = field(default_factory=dict)
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)


def audit(sources: Sequence[str], package: str = "") -> Audit:
    """Compare every seam with a release.

    Args:
        sources: Wheels, folders with unpacked packages, checkouts of repositories, or "installed"; together they are
            one release. Packages that a checkout lacks are those that are installed.
        package: The top-level package whose seams are compared; all where it is empty.

    Raises:
        AuditError: A source is neither, or has no module of upstream, or the release is too old.
    """
    readers: list[ReadModule] = []
    found = Audit()
    for source in dict.fromkeys((*sources, INSTALLED) if any(map(_is_checkout, sources)) else sources):
        read_module, versions = _open(source)
        readers.append(read_module)
        found.versions = {**versions, **found.versions}
    reader = SourceReader(partial(_read, readers))
    release = found.versions.get("bridge", "")
    if why := too_old(release):
        raise AuditError(f"Cannot audit {', '.join(sources)}: {why}.")
    found.known = is_known(release, found.versions.get("core", ""))
    for seam in (each for each in SEAMS if package in ("", each.module.partition(".")[0])):
        state, reason = compare(seam, reader, release)
        if state == "broken":
            found.drift[seam.name] = {"found": reason, "wanted": seam.purpose, "lost": lost_with(seam)}
        elif state == "off" or reason:
            found.not_compared[seam.name] = reason
        else:
            found.fits.append(seam.name)
    found.features = {str(feature): asdict(state) for feature, state in feature_states(found.drift).items()}
    if not found.fits and not found.drift:
        raise AuditError(f"Cannot audit {', '.join(sources)}: no module of Bridge or megatron-core is in there.")
    return found


def _read(readers: Sequence[ReadModule], module: str) -> tuple[str, bool] | None:
    """Read a module where its package is: what a checkout has no more is not found elsewhere."""
    package = ".".join(module.split(".")[: 2 if module.startswith("megatron.") else 1])
    return next((read(module) for read in readers if read(module) or read(package)), None)


def _is_checkout(source: str) -> bool:
    path = Path(source)
    packages = ("megatron", "src/megatron", "transformer_engine")
    return any((path / package).is_dir() for package in packages) and not list(path.glob("*.dist-info"))


def _open(source: str) -> tuple[ReadModule, dict[str, str]]:
    if source == INSTALLED:
        release = bridge_release()
        return installed, {"bridge": release} if release else {}
    path = Path(source)
    if not path.is_dir() and not zipfile.is_zipfile(path):
        raise AuditError(f"Cannot audit {source}: it must be a wheel, a folder or the word {INSTALLED}.")
    folder = path if path.is_dir() else zipfile.Path(path)
    found = map(_DISTRIBUTION.fullmatch, sorted(entry.name for entry in folder.iterdir()))
    read = from_folders([folder, folder / "src"])  # where Bridge's repository has its package
    written = {name: _written_version(read, name) for name in ("bridge", "core")}
    return read, {name: v for name, v in written.items() if v} | {match[1]: match[2] for match in found if match}


def _written_version(read: ReadModule, name: str) -> str:
    """Return the version that a package's source says it is; empty where it is not there."""
    text, _ = read(f"megatron.{name}.package_info") or ("", False)
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)$", text, re.MULTILINE))


def render(found: Audit) -> str:
    """Return an audit as text."""
    versions = ", ".join(f"megatron-{name} {version}" for name, version in sorted(found.versions.items()))
    lines = [f"{versions or 'unknown versions'}{'' if found.known else ' (not in the version table)'}"]
    for name, difference in sorted(found.drift.items()):
        lines += [
            f"  drift  {name}: {difference['found']}",
            f"         wanted: {difference['wanted']}",
            f"         lost: {difference['lost']}",
        ]
    lines += [f"  -      {name}: {reason}" for name, reason in sorted(found.not_compared.items())]
    lines.append(f"{len(found.fits)} seams fit, {len(found.drift)} drifted, {len(found.not_compared)} not compared")
    lines.append(f"lost for users: {', '.join(lost_features(found.drift)) or 'no feature'}")
    return "\n".join(lines)


class CombinationStatus(NamedTuple):
    """What a combination of releases was checked with.

    Attributes:
        state: "run" (the plugin's tests ran with it), "audited" (every seam was compared with its sources) or
            "unknown".
        reason: What was run, what the audit found, or which release was not audited.
    """

    state: Literal["run", "audited", "unknown"]
    reason: str


@functools.cache
def audit_record() -> dict[str, Any]:
    """Return what `scripts/audit_releases.py` wrote.

    "audits" has an entry for each pair of Bridge and megatron-core, and for each release of the other packages: its
    "releases" (package -> version), the number of seams "compared", and the "drift" (seam -> what differs).
    """
    record: dict[str, Any] = json.loads(importlib.resources.files(seams).joinpath("audited.json").read_text())
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


def nearest_set(versions: Mapping[str, str | None]) -> str:
    """Return the set of releases that is nearest to a combination, how it differs, and what was run with it."""
    sets = {**CONTAINERS, **{release.bridge: release for release in RELEASES[1:]}, "newest": NEWEST}

    def same(name: str) -> tuple[bool, int]:
        known = [minor(version) == minor(versions.get(name) or "") for name, version in sets[name].packages.items()]
        return known[0], sum(known)

    nearest = max(reversed(sets), key=same)
    others = {name: v for name, v in sets[nearest].packages.items() if v and versions.get(name) != v}
    differs = ", ".join(f"{name} {version}" for name, version in others.items())
    return f"{nearest}{f' (which has {differs})' if differs else ''}. Run with it: {sets[nearest].tests}"


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
    drift = {name for entry in entries for name in entry["drift"]}
    compared, features = sum(entry["compared"] for entry in entries), lost_features(drift)
    reason = f"{compared - len(drift)} of {compared} seams fit the releases' sources; nothing was run"
    lost = f". Lost: {', '.join(features)}" if features else ""
    return CombinationStatus("audited", reason + lost)
