"""Training as a user starts it: run_recipe.py in processes of its own, and what its log says."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge_cg_plugin.report.training_log import Run, read_log
from examples.photographs.processes import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "performance" / "run_recipe.py"
LAST_CHARACTERS = 6000


def run_recipe(
    words: Sequence[str], folder: Path, limit_s: float, gpus: int = 1, environment: Mapping[str, str] | None = None
) -> tuple[Run, str]:
    """Run run_recipe.py in a folder and return its run and its output; with several GPUs torchrun starts it.

    Raises:
        AssertionError: It ended with another status than 0.
        subprocess.TimeoutExpired: It took longer than `limit_s` seconds.
    """
    workers = ["-m", "torch.distributed.run", f"--nproc_per_node={gpus}", f"--master_port={free_port()}"]
    command = [sys.executable, *(workers if gpus > 1 else ()), str(SCRIPT), *words]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port()), **(environment or {})}
    log = folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s
        )
    text = log.read_text()
    assert done.returncode == 0, text[-LAST_CHARACTERS:]
    return read_log(log), text


def assert_checks_passed(text: str, least: int) -> None:
    """Assert that replays were compared with eager so many times at least, each time with success."""
    assert text.count("check passed") >= least and "check FAILED" not in text
