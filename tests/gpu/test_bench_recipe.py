"""The benchmark of a full-size recipe on a GPU: LoRA of the 8B model, eager once and with all graphs once."""

import pytest
import torch

from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_recipe
from scripts.performance.records import check_record

STEPS = WARM_UP + 4
LEAST_GIB = 60  # of the GPU's memory


def test_encoder_and_language_model_replay_and_train_what_eager_trains(tmp_path):
    if torch.cuda.get_device_properties(0).total_memory < LEAST_GIB * 2**30:
        pytest.skip(f"needs {LEAST_GIB} GiB of GPU memory")
    out = tmp_path / "r.jsonl"
    line = ["--steps", str(STEPS), "--eager-runs", "1", "--global-batch", "4"]
    status = bench_recipe.main(["--out", str(out), *line])
    found = {record["mode"]: record for record in read_records(out)}
    print(found)
    assert status == 0, found
    for record in found.values():
        check_record(record)
    plugin, eager = found["plugin"], found["eager1"]
    assert plugin["graphs"]["replays"] > 0 and plugin["packed_graphs"]["replays"] > 0
    assert not plugin["graphs"]["fallbacks"] and not plugin["language_model_graphs"]
    assert not any(eager[name] for name in ("graphs", "packed_graphs", "language_model_graphs"))
    assert plugin["losses"][0] == pytest.approx(eager["losses"][0], rel=1e-3)
    assert plugin["loss_rel"] < 2e-2 and plugin["ratio"] < 0.8
    assert plugin["memory_gb"] > 1 and plugin["capture_s"] > 0
