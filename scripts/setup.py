"""Set up .venv with Python 3.12, the pinned stack, the test tools and this project.

    python3 scripts/setup.py

Runs under any Python from 3.9 on and needs nothing but the standard library. Each step leaves a stamp under .venv, so
a run that was interrupted goes on where it stopped and a further run does nothing. Environment variables:
BRIDGE_CG_WHEELS names a folder with a transformer-engine-torch wheel, MAX_JOBS bounds the compiler processes of a
build from source.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / ".setup"
STACK = ROOT / "requirements" / "stack.txt"
ATTENTION = ROOT / "requirements" / "attention.txt"
TEST = ROOT / "requirements" / "test.txt"
# Where a wheel that was built here is kept, so that a new .venv need not build it again.
BUILT = ROOT / ".cache" / "wheels"

VERSION = (3, 12)
DISK_GB = 12
HEARTBEAT_S = 20
TE_TORCH = "transformer-engine-torch"
RESILIENCY = "nvidia-resiliency-ext"
GIVEN_WHEEL_GLIBC = (2, 36)
RESILIENCY_GLIBC = (2, 39)
CUDA_MAJOR = 13
GIB_PER_COMPILER = 4
# Processes of pip that install the stack.
INSTALLERS = 2


class SetupError(Exception):
    """Something that this script foresees is missing or failed; the message says what to do."""


@dataclass(frozen=True)
class Step:
    """One step of the set-up.

    Attributes:
        name: Names its stamp and its log.
        title: What it does and about how long it takes.
        inputs: What decides whether it must run again.
        action: Does it. Takes whether an earlier result with other inputs is there, and the log file.
    """

    name: str
    title: str
    inputs: tuple
    action: Callable[[bool, Path], None]

    @property
    def key(self) -> str:
        """Hash of the inputs."""
        return hashlib.sha256(repr(self.inputs).encode()).hexdigest()

    @property
    def stamp(self) -> Path:
        """File that holds the key of the last finished run."""
        return STATE / f"{self.name}.stamp"

    def stamped(self) -> str | None:
        """Return the key of the last finished run."""
        return self.stamp.read_text().strip() if self.stamp.is_file() else None


# What is on this machine


def glibc() -> tuple[int, ...]:
    """Return the version of the C library, (0,) if it is not glibc."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        name = ""
    return tuple(int(part) for part in re.findall(r"\d+", name)) or (0,)


def pinned(path: Path) -> dict[str, str]:
    """Return the versions that a requirements file pins, by name."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def python_candidates() -> Iterator[str]:
    """Yield what may be a Python 3.12, best first."""
    yield sys.executable
    for folder in os.get_exec_path():
        if os.access(Path(folder) / "python3.12", os.X_OK):
            yield str(Path(folder) / "python3.12")
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from (str(path) for path in sorted(versions.glob("3.12*/bin/python"), reverse=True))
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", "3.12"], capture_output=True, text=True)
        if found.returncode == 0:
            yield found.stdout.strip()


def python_version(python: str | Path) -> tuple[int, ...] | None:
    """Return the version of an interpreter, None if it does not run: pyenv's shims answer with an error."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
        return tuple(int(part) for part in answer.stdout.split()) if answer.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def find_python() -> str:
    """Return a Python 3.12 that runs and can make virtual environments.

    Raises:
        SetupError: There is none.
    """
    crippled = None
    for python in python_candidates():
        if python_version(python) != VERSION:
            continue
        if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return python
        crippled = python
    if crippled is not None:
        raise SetupError(
            f"{crippled} cannot make virtual environments: its modules venv and ensurepip are missing. "
            "On Debian and Ubuntu install the package python3.12-venv."
        )
    raise SetupError(
        "Python 3.12 is missing; megatron-bridge runs on no other. Looked at this interpreter, python3.12 on PATH, "
        "pyenv's versions and uv. Install one of them: your system's python3.12 and python3.12-venv, "
        "`pyenv install 3.12`, or `uv python install 3.12`; then run this again."
    )


def installed(package: str) -> str | None:
    """Return the version of a package in the virtual environment, None without it."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    answer = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, env=clean_environment())
    return answer.stdout.strip() or None


def check_machine() -> None:
    """Make sure that the stack can be installed here at all.

    Raises:
        SetupError: It cannot.
    """
    if not sys.platform.startswith("linux") or glibc() == (0,):
        raise SetupError(f"the stack has packages for Linux with glibc only; this is {platform.platform()}")
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < DISK_GB:
        raise SetupError(
            f"{free:.1f} GiB of disk are free under {ROOT}; the stack with its downloads needs about {DISK_GB}. "
            "Free some, or move the checkout to another disk."
        )


# Running commands


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment without what would lead Python or pip elsewhere."""
    leading = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in leading}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONWARNINGS": "ignore", **changes}


def run(log: Path, *command: str | Path, **environment: str) -> None:
    """Run a command with its output appended to `log`; shows a line of it from time to time.

    Raises:
        SetupError: It failed; the message ends with its last lines.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=clean_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = wait(process, log)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        raise SetupError(
            f"`{' '.join(Path(str(part)).name if i == 0 else str(part) for i, part in enumerate(command))}` "
            f"ended with status {status}. Its last lines (all of it: {log}):\n"
            + "\n".join(f"    {line}" for line in last_lines(log, 15))
            + "\nRun this again after mending it; finished steps are kept."
        )


def wait(process: subprocess.Popen, log: Path) -> int:
    """Wait for a process, with a sign of life every `HEARTBEAT_S` seconds."""
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            last = last_lines(log, 1)
            print(f"      {time.monotonic() - started:4.0f} s: {(last or ['...'])[0][:90]}", flush=True)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()][-count:]


def pip(log: Path, *arguments: str | Path, **environment: str) -> None:
    """Run the virtual environment's pip."""
    run(log, PYTHON, "-m", "pip", "--no-color", *arguments, **environment)


# The steps


def make_venv(again: bool, log: Path) -> None:
    """Create .venv; one that is there with Python 3.12 stays."""
    if PYTHON.is_symlink() or PYTHON.exists():
        version = python_version(PYTHON)
        if version != VERSION:
            found = "does not run" if version is None else f"is Python {'.'.join(map(str, version))}"
            raise SetupError(f"{PYTHON} {found}; remove the folder {VENV} and run this again")
    run(log, find_python(), "-m", "venv", VENV)


def install_stack(again: bool, log: Path) -> None:
    """Install the stack, all but the two packages that pip alone cannot."""
    special = (TE_TORCH, RESILIENCY)
    packages = [f"{name}=={version}" for name, version in pinned(STACK).items() if name not in special]

    def install(part: int) -> None:
        own = log.with_stem(f"{log.stem}-{part + 1}")
        own.write_bytes(b"")
        wanted = own.with_suffix(".txt")
        wanted.write_text("\n".join(packages[part::INSTALLERS]) + "\n")
        # pip would compile all 23,000 files, one after another; an import compiles those that it needs.
        pip(own, "install", "--progress-bar", "off", "--no-compile", "--no-deps", "-r", wanted)

    # Each unpacks with one core, and without dependencies none reads what another installs.
    with ThreadPoolExecutor(INSTALLERS) as installers:
        list(installers.map(install, range(INSTALLERS)))


def install_te_torch(again: bool, log: Path) -> None:
    """Install transformer-engine-torch from a wheel that is there, else build one."""
    if not again and installed(TE_TORCH) == pinned(STACK)[TE_TORCH]:
        return
    wheel = given_wheel() or built_wheel()
    if wheel is None:
        print("      no wheel is there: compiling it takes about 15 minutes on 2 cores, once", flush=True)
        build_te_torch(log)
        wheel = built_wheel()
        if wheel is None:
            raise SetupError(f"the build left no wheel in {built_folder()}; see {log}")
    pip(log, "install", "--no-deps", "--no-index", *(["--force-reinstall"] if again else []), wheel)


def given_wheel() -> Path | None:
    """Return a fitting wheel from the folder BRIDGE_CG_WHEELS, or from ../shared/stack/wheels."""
    named = os.environ.get("BRIDGE_CG_WHEELS")
    folder = Path(named) if named else ROOT.parent / "shared" / "stack" / "wheels"
    if named and not folder.is_dir():
        raise SetupError(f"BRIDGE_CG_WHEELS={named}: there is no such folder")
    wheel = wheel_in(folder) if glibc() >= GIVEN_WHEEL_GLIBC else None
    if named and wheel is None:
        print(f"      no wheel in {folder} fits this machine and version {pinned(STACK)[TE_TORCH]}", flush=True)
    return wheel


def built_wheel() -> Path | None:
    """Return a wheel that an earlier run built against the same PyTorch."""
    return wheel_in(built_folder())


def built_folder() -> Path:
    """Return where wheels built against the pinned PyTorch are kept."""
    return BUILT / f"torch-{pinned(STACK)['torch']}"


def wheel_in(folder: Path) -> Path | None:
    """Return the folder's transformer-engine-torch wheel for this Python and processor."""
    name = f"{TE_TORCH.replace('-', '_')}-{pinned(STACK)[TE_TORCH]}-cp312-cp312-*{platform.machine()}.whl"
    return next(iter(sorted(folder.glob(name))), None)


def build_te_torch(log: Path) -> None:
    """Compile transformer-engine-torch against the installed PyTorch."""
    toolkit = check_toolchain()
    pip(log, "install", "setuptools<82", "wheel", "ninja", "pybind11")
    nvidia = PYTHON.parents[1] / "lib" / "python3.12" / "site-packages" / "nvidia"
    includes = [str(path) for path in sorted(nvidia.glob("*/include"))]
    built_folder().mkdir(parents=True, exist_ok=True)
    pip(
        log,
        *("wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", TE_TORCH),
        *("--wheel-dir", built_folder(), f"{TE_TORCH}=={pinned(STACK)[TE_TORCH]}"),
        CPATH=os.pathsep.join([*includes, *filter(None, [os.environ.get("CPATH")])]),
        CUDA_HOME=str(toolkit),
        MAX_JOBS=os.environ.get("MAX_JOBS") or str(compilers()),
        # Else its build first asks for a binary from a place that many machines cannot reach.
        NVTE_PYTORCH_FORCE_BUILD=os.environ.get("NVTE_PYTORCH_FORCE_BUILD", "TRUE"),
        PATH=os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", "")]),
    )


def compilers() -> int:
    """Return how many compiler processes fit the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory / GIB_PER_COMPILER)))


def check_toolchain() -> Path:
    """Return the CUDA toolkit's folder.

    Raises:
        SetupError: It, the compiler or Python's headers are missing.
    """
    missing = []
    if not shutil.which(os.environ.get("CXX") or "g++") and not shutil.which("c++"):
        missing.append("a C++ compiler (g++; the package g++ or build-essential)")
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    include = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True).stdout.strip()
    if not (Path(include) / "Python.h").is_file():
        missing.append("Python's headers (Python.h; the package python3.12-dev)")
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    if not (toolkit / "include" / "crt" / "host_config.h").is_file():
        missing.append(f"the CUDA {CUDA_MAJOR} toolkit's headers (looked in {toolkit}; set CUDA_HOME to another place)")
    if missing:
        raise SetupError(
            f"{TE_TORCH} must be compiled, and this is missing:\n"
            + "\n".join(f"    {item}" for item in missing)
            + "\nOr name a folder that has its wheel for Python 3.12 in BRIDGE_CG_WHEELS."
        )
    return toolkit


def install_resiliency(again: bool, log: Path) -> None:
    """Install nvidia-resiliency-ext; where its wheel is for a newer glibc, unpack it."""
    wanted = f"{RESILIENCY}=={pinned(STACK)[RESILIENCY]}"
    if glibc() >= RESILIENCY_GLIBC:
        pip(log, "install", "--no-deps", wanted)
        return
    tag = f"manylinux_{'_'.join(map(str, RESILIENCY_GLIBC))}_{platform.machine()}"
    with tempfile.TemporaryDirectory() as folder:
        pip(
            log,
            *("download", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--platform", tag),
            *("--dest", folder, wanted),
        )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(VENV / "lib" / "python3.12" / "site-packages")


def install_from(requirements: Path) -> Callable[[bool, Path], None]:
    """Return what installs the packages of a requirements file."""
    words = ("install", "--progress-bar", "off", "--no-compile", "--no-deps", "-r", requirements)
    return lambda again, log: pip(log, *words)


def install_project(again: bool, log: Path) -> None:
    """Install this project in place."""
    pip(log, "install", "--no-deps", "--no-build-isolation", "-e", ROOT)


def check_imports(again: bool, log: Path) -> None:
    """Import what everything else rests on; wandb first, which takes 9 s more after Bridge."""
    code = (
        "import wandb, torch, transformer_engine.pytorch, megatron.bridge.recipes, bridge_cg_plugin\n"
        "from importlib.metadata import version\n"
        "names = 'torch', 'transformer-engine', 'megatron-core', 'megatron-bridge'\n"
        "print(*(f'{n} {version(n)},' for n in names), 'a GPU' if torch.cuda.is_available() else 'no GPU')"
    )
    run(log, PYTHON, "-c", code, PYTHONDONTWRITEBYTECODE="")
    print(f"      {last_lines(log, 1)[0]}", flush=True)


def steps() -> list[Step]:
    """Return the steps in order."""
    versions = pinned(STACK)
    libc, machine = glibc(), platform.machine()
    project = ((ROOT / "pyproject.toml").read_text(), (ROOT / "bridge_cg_plugin" / "__init__.py").read_text())
    plan = [
        Step("venv", "make .venv with Python 3.12 (10 s)", (str(VENV), VERSION), make_venv),
        Step("stack", f"install {len(versions) - 2} pinned packages (2 min, 6 GB)", (versions,), install_stack),
        Step("te_torch", f"install {TE_TORCH}", (versions[TE_TORCH], versions["torch"], machine), install_te_torch),
        Step("resiliency", f"install {RESILIENCY} (5 s)", (versions[RESILIENCY], libc, machine), install_resiliency),
        Step("attention", "install nvidia-cudnn-frontend (5 s)", (pinned(ATTENTION),), install_from(ATTENTION)),
        Step("test", "install pytest, ruff and scikit-image (10 s)", (pinned(TEST),), install_from(TEST)),
        Step("project", "install bridge_cg_plugin in place (5 s)", project, install_project),
    ]
    check = Step("check", "import everything once (40 s)", tuple(step.key for step in plan), check_imports)
    return [*plan, check]


def set_up() -> int:
    """Run every step whose inputs changed or that never finished, then the check; returns how many ran."""
    plan = steps()
    ran = 0
    # The Python that .venv was made from may have gone.
    if plan[0].stamped() == plan[0].key and python_version(PYTHON) != VERSION:
        plan[0].stamp.unlink()
    for number, step in enumerate(plan, 1):
        done = step.stamped()
        if done == step.key and not (ran and step.name == "check"):
            continue
        if step.name == "stack" or (step.name == "venv" and not VENV.exists()):
            check_machine()
        if step.name == "stack" and not (installed(TE_TORCH) or given_wheel() or built_wheel()):
            check_toolchain()  # better now than after gigabytes of downloads
        print(f"[{number}/{len(plan)}] {step.title}", flush=True)
        started = time.monotonic()
        VENV.mkdir(exist_ok=True)
        STATE.mkdir(exist_ok=True)
        log = STATE / f"{step.name}.log"
        log.write_bytes(b"")
        step.stamp.unlink(missing_ok=True)
        step.action(done is not None, log)
        step.stamp.write_text(step.key + "\n")
        print(f"      done in {time.monotonic() - started:.0f} s", flush=True)
        ran += 1
    return ran


@contextmanager
def only_one() -> Iterator[None]:
    """Wait for another set-up of this checkout that is under way."""
    with Path(__file__).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Set up; returns the exit status."""
    if len(sys.argv) > 1:
        print(__doc__.strip())
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    try:
        with only_one():
            if set_up():
                print(f"ready: {PYTHON.relative_to(ROOT)}")
    except SetupError as error:
        print(f"set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
