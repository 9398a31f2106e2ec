"""Environments for every release of the version table and for containers, and commands in one of them.

    python scripts/releases.py                      make those of the version table that are missing
    python scripts/releases.py on RELEASE COMMAND   run a command with that release: a bridge version, newest, oldest or
                                                    a container, which is made if it is missing

The newest release is what .venv has. Another one is a folder `.releases/<name>` with its wheels unpacked, which comes
first on sys.path; everything else is .venv's. A container's wheels are those of `requirements/<name>.txt`: what of it
need not be compiled and is not tied to a PyTorch. Environment variable: BRIDGE_CG_RELEASES names another folder than
`.releases`.
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

from bridge_cg_plugin.upstream.seams.seam import NEWEST, OLDEST, RELEASES

FOLDER = Path(os.environ.get("BRIDGE_CG_RELEASES") or ROOT / ".releases").resolve()
PYTHON = ROOT / ".venv" / "bin" / "python"


class ReleaseError(Exception):
    """Something that this script foresees is missing or failed; the message says what to do."""


# Name -> its packages, each as "name==version"; none where they are .venv's.
SETS: dict[str, list[str]] = {
    **{each.bridge: [f"megatron-bridge=={each.bridge}", f"megatron-core=={each.core}"] for each in RELEASES},
    **{path.stem: path.read_text().splitlines()[1:] for path in sorted((ROOT / "requirements").glob("nemo-*.txt"))},
    NEWEST.bridge: [],
}


def is_complete(name: str) -> bool:
    """Whether a set's packages are there."""
    return all(list((FOLDER / name).glob(f"{_stem(each)}.dist-info/RECORD")) for each in SETS[name])


def _stem(package: str) -> str:
    return package.replace("-", "_").replace("==", "-")


def download(wanted: list[str], wheels: Path) -> list[Path]:
    """Download wheels with the index that pip is set up for; returns them.

    Raises:
        ReleaseError: pip failed.
    """
    command = [PYTHON, "-m", "pip", "--no-color", "download", "--progress-bar", "off", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", wheels, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if done.returncode:
        lines = "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-10:])
        raise ReleaseError(f"pip could not download {' and '.join(wanted)}:\n{lines}\nRun this again after mending it.")
    return [next(wheels.glob(f"{_stem(each)}-*.whl")) for each in wanted]


def make(name: str) -> None:
    """Make a set's folder; an interrupted run leaves none."""
    folder, unfinished = FOLDER / name, FOLDER / f".{name}.unfinished"
    for old in (folder, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    wheels = FOLDER / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in download(SETS[name], wheels):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unfinished)
    unfinished.rename(folder)


@contextmanager
def only_one() -> Iterator[None]:
    """Wait for another run of this script."""
    with Path(__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_all(names: list[str]) -> None:
    """Make what is missing of some sets.

    Raises:
        ReleaseError: .venv or the network is missing.
    """
    missing = [name for name in names if not is_complete(name)]
    if missing and not PYTHON.exists():
        raise ReleaseError("there is no .venv; run ./run setup first")
    for number, name in enumerate(missing, 1):
        print(f"[{number}/{len(missing)}] {name}: {', '.join(SETS[name])}", flush=True)
        make(name)


def named(name: str) -> str:
    """Return the set of a name.

    Raises:
        ReleaseError: There is none.
    """
    known = {**{each: each for each in SETS}, "newest": NEWEST.bridge, "oldest": OLDEST.bridge}
    if name not in known:
        raise ReleaseError(f"there is no release {name!r}; known are {', '.join(known)}")
    return known[name]


def environment(name: str) -> dict[str, str]:
    """Return the environment variables with which a Python process uses a set."""
    path = [str(FOLDER / name)] if SETS[name] else []
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
            make_all([release.bridge for release in RELEASES] if release is None else [release])
    except ReleaseError as error:
        print(f"releases: {error}", file=sys.stderr)
        return 1
    if release is None:
        return 0
    variables = environment(release)
    os.execvpe(arguments[2], arguments[2:], variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
