"""The benchmark of encoders, on small ones: every mode of every encoder gives a record."""

from dataclasses import replace

import pytest

from bridge_cg_tools.benchmarks.models import tower
from bridge_cg_tools.benchmarks.models.encoders import ENCODERS
from bridge_cg_tools.benchmarks.records.results import check_record, read_records
from scripts.performance import bench_encoders

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
    monkeypatch.setitem(bench_encoders.ENCODERS, name, tiny)
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--encoders", "qwen2"], f"--encoders qwen2: it must be any of {', '.join(ENCODERS)}."),
        (["--layers", "1"], "--layers 1: it must be a whole number from 2 on"),
        ([], "--out"),
    ],
)
def test_wrong_arguments_are_refused(words, said, capsys):
    assert bench_encoders.main(words) == 2
    assert said in capsys.readouterr().err
