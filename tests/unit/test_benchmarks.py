"""Benchmarks without a GPU: the form of records, the page of their tables, and one small run of each."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.performance import bench_vision, records, tables
from scripts.performance.records import read_records
from tests.models.encoders import ENCODERS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda p: p.name)
def test_committed_records_are_as_the_format_says(path):
    found = read_records(path)
    assert found
    for one in found:
        records.check_record(one)


def test_the_pages_are_those_of_the_records():
    for folder, write in ((FOLDER, tables.page), (tables.ROOT, tables.readme)):
        text = (folder / "README.md").read_text()
        assert write(FOLDER, text) == text, "run scripts/performance/tables.py"


def test_an_encoder_is_measured_in_every_mode_and_equals_eager(monkeypatch, tmp_path):
    tiny = replace(ENCODERS["qwen25_vl"], sizes={"1x448": [(1, 8, 12), (1, 4, 6)]})
    monkeypatch.setitem(bench_vision.ENCODERS, "qwen25_vl", tiny)
    out = tmp_path / "r.jsonl"
    words = ["--encoders", "qwen25_vl", "--layers", "2", "--repeats", "3", "--out", str(out)]
    assert bench_vision.main(words) == 0
    found = {r["mode"]: r for r in read_records(out)}
    assert set(found) == {"eager", *tiny.modes}
    for mode, one in found.items():
        records.check_record(one)
        assert one["case"] == "qwen25_vl_1x448_2layers" and one["ms"] > 0
        assert mode == "eager" or (one["forward_rel"] <= 1e-6 and one["grad_rel"] <= 2e-5 and not one["fallbacks"])
