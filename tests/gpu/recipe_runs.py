"""Training as a user starts it: run_recipe.py in processes of its own, and what its log says."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge_cg_plugin.cli.report.runs import Run
from bridge_cg_plugin.cli.report.sources import read_log
from bridge_cg_plugin.cli.runs.recipe import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "performance" / "run_recipe.py"
LAST_CHARACTERS = 6000


def run_recipe(
    words: Sequence[str], folder: Path, limit_s: float, gpus: int = 1, environment: Mapping[str, str] | None = None
) -> tuple[Run, str]:
    """Run run_recipe.py in a folder and return its run and its output; for several GPUs it starts the workers.

    Raises:
        AssertionError: It ended with another status than 0.
        subprocess.TimeoutExpired: It took longer than `limit_s` seconds.
    """
    launcher = ("--launcher", "torchrun", "--gpus_per_node", str(gpus)) if gpus > 1 else ()
    command = [sys.executable, str(SCRIPT), *launcher, *words]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port()), **(environment or {})}
    log = folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s
        )
    text = log.read_text()
    assert done.returncode == 0, text[-LAST_CHARACTERS:]
    return read_log(log), text


def checks_passed(text: str) -> int:
    """Return how often replays were compared with eager; none of the comparisons may have failed."""
    assert "differs from eager" not in text
    return sum(map(int, re.findall(r"proofs: (\d+) replays compared with eager", text)))
