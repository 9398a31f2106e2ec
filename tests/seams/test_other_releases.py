"""The option tests on each supported release, in a process where that release comes first on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASES = Path(os.environ.get("BRIDGE_CG_RELEASES", ROOT / ".releases"))


@pytest.mark.parametrize("release", ["0.5.1", "0.4.2"])
def test_options_on_release(release):
    folder = RELEASES / release
    if not (folder / "megatron").is_dir():
        pytest.skip(f"{folder} has no megatron-bridge {release}; name the folder of releases in BRIDGE_CG_RELEASES")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    check = "import megatron.bridge, sys; sys.exit(megatron.bridge.__version__ != sys.argv[1])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", check, release], env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "tests/seams/test_graph_fields.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
