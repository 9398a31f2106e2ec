"""Whether a release of upstream looks as the plugin expects, by its files, not imported."""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import is_known, too_old
from bridge_cg_plugin.upstream.seams.source_reader import ReadModule, SourceReader, from_folders, installed
from bridge_cg_plugin.upstream.seams.states import compare, feature_states, lost_features, lost_with

from .answers import AnswerError

INSTALLED = "installed"
_DISTRIBUTION = re.compile(r"megatron_(bridge|core)-([^/-]+)\.dist-info")


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
        AnswerError: A source is neither, or has no module of upstream, or the release is too old.
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
        raise AnswerError(f"Cannot audit {', '.join(sources)}: {why}.")
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
        raise AnswerError(f"Cannot audit {', '.join(sources)}: no module of Bridge or megatron-core is in there.")
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
        raise AnswerError(f"Cannot audit {source}: it must be a wheel, a folder or the word {INSTALLED}.")
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
