"""`bridge-cg compare` on a GPU with the small preset, as its user starts it."""

import json

import pytest

from bridge_cg_plugin.cli.report.sources import read_log, runs_in
from bridge_cg_plugin.cli.runs import compare
from bridge_cg_plugin.recipes import SMALL_RECIPES

STEPS = 14
(NAME,) = SMALL_RECIPES


def test_eager_and_plugin_on_one_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status = compare.main(["--recipe", NAME, "--steps", str(STEPS), "--out", str(tmp_path), "--time_limit", "240"])
    said = capsys.readouterr().out
    print(said)
    runs = {run.mode: run for run in runs_in(tmp_path / "compare.jsonl")}
    for mode in ("eager1", "eager2", "eager3", "plugin"):
        assert not runs[mode].error, (tmp_path / f"{mode}.log").read_text()[-4000:]
        assert len(runs[mode].losses) == len(runs[mode].times) == STEPS
        assert runs[mode].losses[-1][1] < runs[mode].losses[0][1]
        assert runs[mode].samples_per_s > 0 and runs[mode].tokens_per_s > 0 and runs[mode].peak_gb > 1
        assert runs[mode].tflops_per_gpu > 0
    assert not runs["eager1"].graphs and set(runs["plugin"].graphs) == {"vision", "language model"}
    assert all(graphs.replays > 0 for graphs in runs["plugin"].graphs.values())
    logged = read_log(tmp_path / "plugin.log")
    assert [step for step, _ in logged.losses] == [5, 10] and logged.tflops_per_gpu > 0
    assert logged.losses[1][1] == pytest.approx(sum(loss for _, loss in runs["plugin"].losses[5:10]) / 5, rel=1e-3)
    assert logged.graphs["vision"].replays >= runs["plugin"].graphs["vision"].replays
    verdicts = {v["mode"]: v["state"] for v in json.loads((tmp_path / "page.json").read_text())["verdicts"]}
    assert verdicts["plugin"] == "same", said
    assert status == 0
    assert "**SAME** plugin" in (tmp_path / "page.md").read_text()
