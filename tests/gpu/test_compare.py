"""compare.py on a GPU, with a small Qwen3-VL that trains offline in the place of a recipe."""

import json
import sys

import pytest

from bridge_cg_plugin.report.records import read_records
from bridge_cg_plugin.report.training_log import read_log
from examples.photographs.training import Run
from scripts.performance import compare

STEPS = 12
NAME = "photographs_small_pretrain_config"
# What makes the name a recipe of Bridge in a run's process; then the run, as compare.py would start it.
PRELUDE = f"""
import os, sys
from examples.photographs.processes import free_port
os.environ["MASTER_PORT"] = str(free_port())
import megatron.bridge.recipes as recipes
from examples.photographs.training import Run, skip_helper_build, training_config
skip_helper_build()
def {NAME}():
    return training_config(Run(small=True, steps={STEPS}))
recipes.{NAME} = {NAME}
from scripts.performance.recorded_run import main
sys.exit(main(sys.argv[1:]))
"""


def test_eager_upstream_and_plugin_on_one_page(tmp_path, monkeypatch, capsys):
    real = compare.plan

    def plan(args, rest):
        # The script's own name gives way to the prelude.
        return [
            compare.PlannedRun(r.mode, r.kind, (sys.executable, "-c", PRELUDE, *r.command[2:]))
            for r in real(args, rest)
        ]

    monkeypatch.setattr(compare, "plan", plan)
    monkeypatch.setattr(compare, "refusal", lambda args, rest: "")
    words = ["--recipe", NAME, "--steps", str(STEPS), "--out", str(tmp_path), "--time_limit", "400"]
    words += ["--max_vision_cuda_graph_seq_length", str(Run(small=True).longest()), "--step_func", "qwen3_vl_step"]
    status = compare.main(words)
    said = capsys.readouterr().out
    runs = {run.mode: run for run in read_records(tmp_path / "compare.jsonl")}
    for mode in ("eager1", "eager2", "eager3", "plugin"):
        assert not runs[mode].error, (tmp_path / f"{mode}.log").read_text()[-4000:]
        assert len(runs[mode].losses) == len(runs[mode].times) == STEPS
        assert runs[mode].images_per_s > 0 and runs[mode].tokens_per_s > 0 and runs[mode].peak_gb > 1
        assert runs[mode].tflops_per_gpu > 0
    assert runs["plugin"].graphs["vision"].replays > 0 and not runs["eager1"].graphs
    assert runs["upstream"].wrong and (runs["upstream"].error or runs["upstream"].losses)
    logged = read_log(tmp_path / "plugin.log")
    assert [step for step, _ in logged.losses] == [10] and logged.tflops_per_gpu > 0
    assert logged.losses[0][1] == pytest.approx(sum(loss for _, loss in runs["plugin"].losses[:10]) / 10, rel=1e-3)
    assert logged.graphs["vision"].replays >= runs["plugin"].graphs["vision"].replays
    verdicts = {v["mode"]: v["state"] for v in json.loads((tmp_path / "page.json").read_text())["verdicts"]}
    assert verdicts["plugin"] == "same", said
    assert status == 0
    assert "<svg" in (tmp_path / "page.html").read_text()
