"""The benchmark of encoders, on small ones: every mode of every encoder gives a record."""

from dataclasses import replace

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_encoders
from scripts.performance.models import tower
from scripts.performance.models.encoders import ENCODERS
from scripts.performance.vision import encoder_arguments

TWO = [(1, 8, 12), (1, 4, 6)]
TINY = {
    "qwen35_vl": [(1, 8, 8)],
    **dict.fromkeys(("qwen25_vl", "glm45v", "qwen25_omni", "qwen3_omni", "ministral3"), TWO),
    "siglip": 2,
    "qwen3_omni_audio": [230, 100],
    "nemotron_vl": 2,
    "nemotron_omni": TWO,
}


@pytest.fixture(autouse=True)
def process():
    tower.start_process()


@pytest.mark.parametrize("name", ENCODERS)
def test_every_mode_is_measured_and_equals_eager(name, monkeypatch, tmp_path, capsys):
    tiny = replace(ENCODERS[name], sizes={"tiny": TINY[name]})
    monkeypatch.setitem(encoder_arguments.ENCODERS, name, tiny)
    out = tmp_path / "records.jsonl"
    line = ["--encoders", name, "--layers", "2", "--repeats", "3", "--out", str(out)]
    assert bench_encoders.main(line) == 0
    records = {r["mode"]: r for r in read_records(out)}
    assert set(records) == {"eager", *tiny.modes}
    for mode, record in records.items():
        check_record(record)
        assert record["case"] == f"{name}_tiny_2layers" and record["ms"] > 0
        if mode != "eager":
            assert record["forward_rel"] <= 1e-6 and record["grad_rel"] <= 2e-5 and not record["fallbacks"]
    printed = capsys.readouterr().out
    assert all(f"{name}_tiny_2layers" in printed and mode in printed for mode in records)


def test_modes_and_cases_that_are_named_are_measured(monkeypatch, tmp_path):
    both = {"tiny": TWO, "other": TWO}
    monkeypatch.setitem(encoder_arguments.ENCODERS, "qwen3_omni", replace(ENCODERS["qwen3_omni"], sizes=both))
    out = tmp_path / "records.jsonl"
    line = ["--encoders", "qwen3_omni", "--layers", "2", "--repeats", "3", "--out", str(out)]
    named = ["--cases", "tiny", "--modes", "plugin_fast,plugin_own_attention"]
    assert bench_encoders.main([*line, *named]) == 0
    found = {(r["case"], r["mode"]) for r in read_records(out)}
    modes = ("eager", "plugin_fast", "plugin_own_attention")
    assert found == {("qwen3_omni_tiny_2layers", mode) for mode in modes}


@pytest.mark.parametrize("mode", ["plugin_cudnn", "plugin_flash"])
def test_attention_that_cannot_be_had_gives_no_record(monkeypatch, tmp_path, mode):
    tiny = replace(ENCODERS["siglip"], sizes={"tiny": TINY["siglip"]})
    monkeypatch.setitem(encoder_arguments.ENCODERS, "siglip", tiny)
    out = tmp_path / "records.jsonl"
    line = ["--encoders", "siglip", "--layers", "2", "--repeats", "3", "--out", str(out), "--modes", mode]
    with pytest.raises(RuntimeError, match=f"attention={mode.removeprefix('plugin_')} cannot be had"):
        bench_encoders.main(line)
    assert {r["mode"] for r in read_records(out)} == {"eager"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--encoders", "qwen2"], f"--encoders qwen2: it must be any of {', '.join(ENCODERS)}."),
        (["--modes", "fast", "--out", "r.jsonl"], "--modes fast: it must be any of plugin, plugin_fast"),
        (
            ["--encoders", "siglip", "--cases", "1x8192", "--out", "r.jsonl"],
            "--cases 1x8192: it must be any of 1_image, 2_images",
        ),
        (["--layers", "1"], "--layers 1: it must be a whole number from 2 on"),
        ([], "--out"),
    ],
)
def test_wrong_arguments_are_refused(words, said, capsys):
    assert bench_encoders.main(words) == 2
    assert said in capsys.readouterr().err
