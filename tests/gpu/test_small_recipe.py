"""The small preset through run_recipe.py on a GPU, in a process of its own that may ask no hub for anything."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge_cg_plugin.recipes import SMALL_RECIPES
from bridge_cg_plugin.report.training_log import read_log
from examples.photographs.processes import free_port

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]
(NAME,) = SMALL_RECIPES
STEPS = 20
LIMIT_S = 240  # a minute where nothing else runs


def test_it_trains_in_a_minute_offline(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/performance/run_recipe.py"), "--recipe", NAME]
    words = [f"train.train_iters={STEPS}", "model.vision_cuda_graph_check_interval=8"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port())}
    began, log = time.monotonic(), tmp_path / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S
        )
    took = time.monotonic() - began
    assert done.returncode == 0, log.read_text()[-6000:]
    print(f"{took:.1f} s with the imports")
    run = read_log(log)
    losses = [loss for _, loss in run.losses]
    assert [step for step, _ in run.losses] == [5, 10, 15, 20] and losses[-1] < 0.95 * losses[0]
    graphs = run.graphs["vision"]
    assert graphs.replays >= 0.5 * 4 * (STEPS - 4), graphs
    assert log.read_text().count("check passed") == 2 and "check FAILED" not in log.read_text()
    assert not (tmp_path / "nemo_experiments").exists()
