"""The benchmark of encoders, on small ones: every mode of every encoder gives a record."""

from dataclasses import replace

import pytest

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_vision
from scripts.performance.records import check_record
from tests.models.encoders import ENCODERS

TWO = [(1, 8, 12), (1, 4, 6)]
TINY = {"qwen25_vl": TWO, "qwen3_omni": TWO, "siglip": 2, "nemotron_vl": 2}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that measures small encoders and returns their records by case and mode."""

    def run(name, *words, sizes=("1x448",)):
        tiny = dict.fromkeys(sizes, TINY[name])
        monkeypatch.setitem(bench_vision.ENCODERS, name, replace(ENCODERS[name], sizes=tiny))
        out = tmp_path / "records.jsonl"
        line = ["--encoders", name, "--layers", "2", "--repeats", "3", "--out", str(out), *words]
        try:
            assert bench_vision.main(line) == 0
        finally:
            found = {(r["case"], r["mode"]): r for r in read_records(out)}
        return found

    return run


@pytest.mark.parametrize("name", ["qwen25_vl", "nemotron_vl"])
def test_every_mode_is_measured_and_equals_eager(measured, name, capsys):
    records = measured(name)
    assert set(records) == {(f"{name}_1x448_2layers", mode) for mode in ("eager", *ENCODERS[name].modes)}
    printed = capsys.readouterr().out
    for (case, mode), record in records.items():
        check_record(record)
        assert case in printed and mode in printed and record["ms"] > 0
        if mode != "eager":
            assert record["forward_rel"] <= 1e-6 and record["grad_rel"] <= 2e-5 and not record["fallbacks"]


def test_modes_and_cases_that_are_named_are_measured(measured):
    named = ["--cases", "8mix", "--modes", "plugin_fast,plugin_own_attention"]
    found = measured("qwen3_omni", *named, sizes=("1x448", "8mix"))
    assert set(found) == {
        ("qwen3_omni_8mix_2layers", mode) for mode in ("eager", "plugin_fast", "plugin_own_attention")
    }


@pytest.mark.parametrize("mode", ["plugin_cudnn", "plugin_flash"])
def test_attention_that_cannot_be_had_gives_no_record(measured, mode):
    with pytest.raises(RuntimeError, match=f"attention={mode.removeprefix('plugin_')} cannot be had"):
        measured("siglip", "--modes", mode)


@pytest.mark.parametrize(
    "words", [["--encoders", "qwen2"], ["--modes", "fast"], ["--cases", "3x448"], ["--layers", "1"], ["--repeats", "2"]]
)
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_vision.main(words)
    assert "must be" in capsys.readouterr().err
