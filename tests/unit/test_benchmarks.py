"""Benchmarks without a GPU: the form of records, the page of their tables, and one small run of each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_offload, bench_packed, bench_vision, parity_encoders, records, tables
from scripts.performance.parity_encoders import failures
from tests.models import language_model
from tests.models.encoders import ENCODERS
from tests.models.language_model import Pack

from . import packs

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


def test_packs_are_measured_in_every_mode(monkeypatch, tmp_path):
    pack_of = lambda lengths: Pack(packs.pack(lengths), lengths, torch.ones(1, sum(lengths)))  # noqa: E731
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", pack_of)
    monkeypatch.setattr("tests.models.tower.start_process", lambda: None)
    monkeypatch.setattr(bench_packed, "TOKENS", (320,))
    out = tmp_path / "r.jsonl"
    assert bench_packed.main(["--models", "dense", "--repeats", "3", "--out", str(out)]) == 0
    found = read_records(out)
    assert [one["mode"] for one in found] == ["eager", "plugin", "plugin_4x", "plugin_layers"]
    for one in found:
        records.check_record(one)
        assert one["mode"] == "eager" or not one["fallbacks"]


def test_offloading_is_measured_beside_none(tmp_path, monkeypatch):
    monkeypatch.setitem(bench_offload.SLOTS, "tokens_64", 1)
    out = tmp_path / "r.jsonl"
    words = ["--cases", "tokens_64", "--repeats", "3", "--out", str(out), "--slots", "2", "--targets", "0.5"]
    assert bench_offload.main(words) == 0
    found = read_records(out)
    assert [one["mode"] for one in found] == ["none", "offload", "recompute", "mixed_50"]
    for one in found:
        records.check_record(one)
        assert one["slots"] == 2
    assert all(one["bit_equal"] and one["grad_rel"] == 0 and not one["fallbacks"] for one in found[:3])


def test_mixes_are_replayed_and_what_misses_its_limit_is_named(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ["--encoders", "siglip", "--layers", "2", "--mixes", "2", "--tokens", "256", "--out", str(out)]
    assert parity_encoders.main(words) == 0
    found = read_records(out)
    assert [r["mode"] for r in found] == ["eager", "plugin"] * 2 and failures(found) == []
    assert all(r["bucket"] and r["forward_rel"] <= 1e-6 for r in found if r["mode"] == "plugin")
    eager, graphs = found[:2]
    wrong = [{"forward_rel": 1e-2, "fp32_output": 1.0}, {"forward_rel": float("nan"), "fp32_output": float("nan")}]
    for changes in (*wrong, {"bucket": None, "fallback": "other_batch"}):
        assert failures([eager, {**graphs, "bit_equal": False, **changes}])
