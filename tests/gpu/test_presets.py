"""Presets of the full-size 8B model at their own parallel layout, as a user starts them, with a hub's cache made here.

Weights are random: they would come from the hub.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge_cg_plugin.report.training_log import read_log
from examples.photographs.processes import free_port
from tests.local_hub import write_hub

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
LIMIT_S = 240
# Nothing is saved, loaded or evaluated; few of Bridge's mock images are drawn. Fused accumulation is Apex's, which
# NVIDIA's containers have and the registry has not.
WORDS = (
    f"train.train_iters={STEPS}",
    "train.global_batch_size=4",
    "train.eval_iters=0",
    "validation.eval_iters=0",
    "logger.log_interval=1",
    "logger.tensorboard_dir=null",
    "checkpoint.save=null",
    "checkpoint.load=null",
    "dataset.num_base_examples=16",
    "model.vision_cuda_graph_check_interval=6",
    "model.gradient_accumulation_fusion=false",
)
# Preset -> GPUs.
PRESETS = {
    "qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config": 4,
    "qwen3_vl_8b_vision_graphs_h200_sft_mock_config": 2,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("name", PRESETS)
def test_it_trains_with_every_microbatch_on_graphs(name, hub, tmp_path):
    gpus = PRESETS[name]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} NVIDIA GPUs")
    workers = ["-m", "torch.distributed.run", f"--nproc_per_node={gpus}", f"--master_port={free_port()}"]
    command = [sys.executable, *workers, str(ROOT / "scripts/performance/run_recipe.py")]
    # Fine-tuning would want a checkpoint to start from.
    command += ["--recipe", name, "--mode", "pretrain", *WORDS]
    environment = {**os.environ, **hub, "MASTER_PORT": str(free_port())}
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S
        )
    text = log.read_text()
    assert done.returncode == 0, text[-6000:]
    run = read_log(log)
    print(f"{name}: losses {[loss for _, loss in run.losses]}, ms {[ms for _, ms in run.times]}, {run.peak_gb} GiB")
    assert [step for step, _ in run.losses] == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for _, loss in run.losses)
    graphs = run.graphs["vision"]
    print(graphs)
    assert graphs.replays and not graphs.fallbacks
    assert text.count("check passed") >= 1 and "check FAILED" not in text
