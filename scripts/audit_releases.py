"""Compare the seams with every release of upstream on the package index, without installing one.

    python scripts/audit_releases.py                  download all wheels to a temporary folder (250 MB), audit them
    python scripts/audit_releases.py --wheels FOLDER  the same; download what the folder lacks, and keep it
    python scripts/audit_releases.py --wheels FOLDER --offline
                                                    download nothing

It writes the record bridge_cg_plugin/upstream/seams/audited.json, which ships with the package, and the tables of
docs/releases.md.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli import audit as auditing
from bridge_cg_plugin.upstream.seams.registry import INSTEAD
from bridge_cg_plugin.upstream.seams.seam import BRIDGE, CORE, RELEASES, TRANSFORMER_ENGINE, TRANSFORMERS, minor
from bridge_cg_plugin.upstream.seams.states import lost_features

RECORD = ROOT / "bridge_cg_plugin" / "upstream" / "seams" / "audited.json"
PAGE = ROOT / "docs" / "releases.md"
TABLES = re.compile(r"(<!-- audited -->\n)(.*?)(<!-- /audited -->)", re.DOTALL)
COSTS = re.compile(r"(<!-- costs -->\n)(.*?)(<!-- /costs -->)", re.DOTALL)
# The oldest release of each package that is audited.
FLOORS = {BRIDGE: "0.5.0", CORE: "0.18.0", TRANSFORMER_ENGINE: "2.14.0", TRANSFORMERS: "5.6.0"}
# The newest one, where it is not the newest on the index: released Bridges import with none after it.
CEILINGS = {TRANSFORMERS: "5.23.0"}
# What an audit reads of a seam.
COMPARED = ("name", "module", "target", "formerly", "kind", "parameters", "attributes", "uses", "since", "packaged")


class DownloadError(Exception):
    """pip failed, or a wheel is missing; the message has the reason."""


def numbers(version: str) -> tuple[int, ...]:
    """Return a final release's numbers, for sorting."""
    return tuple(map(int, version.split(".")))


def pip(*arguments: str) -> str:
    """Run pip and return its output.

    Raises:
        DownloadError: It failed.
    """
    command = [sys.executable, "-m", "pip", "--no-color", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DownloadError(f"pip {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def releases_on_index(package: str) -> list[str]:
    """Return a package's final releases between its floor and its ceiling, oldest first."""
    listed = re.search(r"^Available versions: (.*)$", pip("index", "versions", package), re.M)
    final = [v for v in (listed[1].split(", ") if listed else []) if re.fullmatch(r"\d+(\.\d+)+", v)]
    floor, ceiling = FLOORS[package], CEILINGS.get(package)
    within = [v for v in final if numbers(floor) <= numbers(v) <= numbers(ceiling or v)]
    return sorted(within, key=numbers)


def download(folder: Path) -> None:
    """Download the wheel of every release that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    present = wheels(folder)
    for package in FLOORS:
        for version in releases_on_index(package):
            if version not in present[package]:
                print(f"{package} {version}", flush=True)
                wanted = f"{package}=={version}"
                pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted)


def wheels(folder: Path) -> dict[str, dict[str, str]]:
    """Return package -> version -> wheel, newest first."""
    found: dict[str, dict[str, str]] = {}
    for package in FLOORS:
        paths = {path.name.split("-")[1]: str(path) for path in folder.glob(f"{package.replace('-', '_')}-*.whl")}
        found[package] = {version: paths[version] for version in sorted(paths, key=numbers, reverse=True)}
    return found


def audited(folder: Path) -> dict[str, Any]:
    """Audit the wheels of a folder and return the record.

    A release of megatron-core is audited with those of megatron-bridge whose series it belongs to. Each package is
    compared beside the newest releases of the others, since classes derive from theirs.

    Raises:
        DownloadError: The folder lacks a package.
    """
    found = wheels(folder)
    lacking = [package for package, paths in found.items() if not paths]
    if lacking:
        raise DownloadError(f"{folder} has no wheel of {', '.join(lacking)}")
    series = {minor(release.bridge): minor(release.core) for release in RELEASES}
    pairs = [(b, c) for b in found[BRIDGE] for c in found[CORE] if series.get(minor(b)) == minor(c)]
    newest = {package: next(iter(paths)) for package, paths in found.items()}

    def entry(top_level: str, releases: dict[str, str]) -> dict[str, Any]:
        sources = [found[package][version] for package, version in {**newest, **releases}.items()]
        return {"releases": releases, **compared(sources, top_level)}

    return {
        "date": datetime.date.today().isoformat(),
        "registry": registry(),
        "audits": [
            *(entry("megatron", {BRIDGE: b, CORE: c}) for b, c in pairs),
            *(entry("transformer_engine", {TRANSFORMER_ENGINE: v}) for v in found[TRANSFORMER_ENGINE]),
            *(entry("transformers", {TRANSFORMERS: v}) for v in found[TRANSFORMERS]),
        ],
    }


def compared(sources: list[str], package: str) -> dict[str, Any]:
    """Return how many seams of a top-level package were compared with sources, and those that drifted."""
    found = auditing.audit(sources, package)
    drift = {name: difference["found"] for name, difference in found.drift.items()}
    return {"compared": len(found.fits) + len(drift), "drift": drift}


def registry() -> str:
    """Return a digest of what an audit reads of the seams: a record holds for one registry."""
    seams = sorted([str(getattr(seam, field)) for field in COMPARED] for seam in auditing.SEAMS)
    return hashlib.sha256(json.dumps(seams).encode()).hexdigest()[:16]


def tables(record: dict[str, Any]) -> str:
    """Return a record as Markdown: a table for each group of packages, a row for releases with the same result.

    The record has the names of the seams that drifted.
    """
    groups = itertools.groupby(record["audits"], lambda entry: tuple(entry["releases"]))
    return "\n\n".join([*(_table(names, entries) for names, entries in groups), f"Audited on {record['date']}."])


def _table(packages: Iterable[str], entries: Iterable[dict[str, Any]]) -> str:
    lines = [[*packages, "seams compared", "drifted", "not available"]]
    lines.append(["---"] * len(lines[0]))
    for (count, drift), same in itertools.groupby(entries, lambda entry: (entry["compared"], tuple(entry["drift"]))):
        columns = zip(*(entry["releases"].values() for entry in same), strict=True)
        lost = ", ".join(name.removeprefix("vision graphs of ") for name in lost_features(drift)) or "none"
        lines.append([*map(_span, columns), str(count), str(len(drift)), lost])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _span(versions: Iterable[str]) -> str:
    different = list(dict.fromkeys(versions))
    return ", ".join(different) if len(different) < 4 else f"{different[-1]} to {different[0]}"


def costs() -> str:
    """Return what each seam costs where it does not fit, as Markdown."""
    lines = ["| seam | without it graphs have |", "| --- | --- |"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {words} |" for words, names in INSTEAD.items()]
    others = sum(not seam.instead for seam in auditing.SEAMS)
    return "\n".join([*lines, f"| each of the other {others} | all but the features that it serves |"])


def write(record: dict[str, Any]) -> None:
    """Write the record and the tables of the page."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    text = TABLES.sub(lambda found: f"{found[1]}{tables(record)}\n{found[3]}", PAGE.read_text())
    PAGE.write_text(COSTS.sub(lambda found: f"{found[1]}{costs()}\n{found[3]}", text))


def main(arguments: list[str]) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheels", type=Path, help="keep the wheels in this folder; a temporary one if left out")
    parser.add_argument("--offline", action="store_true", help="download nothing")
    options = parser.parse_args(arguments)
    keep = options.wheels is not None
    try:
        with nullcontext(options.wheels) if keep else tempfile.TemporaryDirectory() as folder:
            if not options.offline:
                download(Path(folder))
            write(audited(Path(folder)))
    except DownloadError as error:
        print(f"audit_releases: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
