"""Environments for every release of the version table, and commands in one of them.

    python scripts/releases.py                      make all that are missing
    python scripts/releases.py on RELEASE COMMAND   run a command with that release (a bridge version, newest or oldest)

The newest release is what .venv has. An older one is a folder `.releases/<bridge version>` with its two wheels
unpacked, which comes first on sys.path; everything else is .venv's. Environment variable: BRIDGE_CG_RELEASES names
another folder than `.releases`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.upstream.seams.seam import NEWEST, OLDEST, RELEASES, Release

FOLDER = Path(os.environ.get("BRIDGE_CG_RELEASES") or ROOT / ".releases").resolve()
PYTHON = ROOT / ".venv" / "bin" / "python"


class ReleaseError(Exception):
    """Something that this script foresees is missing or failed; the message says what to do."""


def folder_of(release: Release) -> Path:
    """Return where an older release's packages lie."""
    return FOLDER / release.bridge


def is_complete(release: Release) -> bool:
    """Whether both of a release's packages are there."""
    folder = folder_of(release)
    names = (f"megatron_bridge-{release.bridge}.dist-info", f"megatron_core-{release.core}.dist-info")
    return all((folder / name / "RECORD").is_file() for name in names)


def download(release: Release, wheels: Path) -> list[Path]:
    """Download a release's two wheels with the index that pip is set up for; returns them.

    Raises:
        ReleaseError: pip failed.
    """
    wanted = [f"megatron-bridge=={release.bridge}", f"megatron-core=={release.core}"]
    command = [PYTHON, "-m", "pip", "--no-color", "download", "--progress-bar", "off", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", wheels, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if done.returncode:
        lines = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-10:])
        raise ReleaseError(f"pip could not download {' and '.join(wanted)}:\n{lines}\nRun this again after mending it.")
    names = (f"megatron_bridge-{release.bridge}-*.whl", f"megatron_core-{release.core}-*.whl")
    return [next(wheels.glob(name)) for name in names]


def make(release: Release) -> None:
    """Make a release's folder; an interrupted run leaves none."""
    folder, unfinished = folder_of(release), FOLDER / f".{release.bridge}.unfinished"
    for old in (folder, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    wheels = FOLDER / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in download(release, wheels):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unfinished)
    unfinished.rename(folder)


@contextmanager
def only_one() -> Iterator[None]:
    """Wait for another run of this script."""
    with Path(__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_all() -> None:
    """Make what is missing.

    Raises:
        ReleaseError: .venv or the network is missing.
    """
    if not PYTHON.exists() and not all(is_complete(release) for release in RELEASES[1:]):
        raise ReleaseError("there is no .venv; run ./run setup first")
    older = RELEASES[1:]
    for number, release in enumerate(older, 1):
        if not is_complete(release):
            print(f"[{number}/{len(older)}] megatron-bridge {release.bridge}, core {release.core} (4 MB)", flush=True)
            make(release)


def named(name: str) -> Release:
    """Return the release of a name.

    Raises:
        ReleaseError: There is none.
    """
    names = {**{r.bridge: r for r in RELEASES}, "newest": NEWEST, "oldest": OLDEST}
    if name not in names:
        raise ReleaseError(f"there is no release {name!r}; known are {', '.join(names)}")
    return names[name]


def environment(release: Release) -> dict[str, str]:
    """Return the environment variables with which a Python process uses a release."""
    path = [str(folder_of(release))] if release != NEWEST else []
    path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    commands = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", "")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PATH": commands}


def main(arguments: list[str]) -> int:
    """Run; returns the exit status."""
    if arguments and (arguments[0] != "on" or len(arguments) < 3):
        print(__doc__.strip())
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        release = named(arguments[1]) if arguments else None
        with only_one():
            make_all()
    except ReleaseError as error:
        print(f"releases: {error}", file=sys.stderr)
        return 1
    if release is None:
        return 0
    variables = environment(release)
    os.execvpe(arguments[2], arguments[2:], variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
