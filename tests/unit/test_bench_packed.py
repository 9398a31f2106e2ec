"""The benchmark of packed documents without a GPU, on small models."""

import torch

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_packed
from scripts.performance.records import check_record
from tests.models import language_model
from tests.models.language_model import Pack

from . import packs


def small_pack(lengths):
    return Pack(packs.pack(lengths), lengths, torch.ones(1, sum(lengths)))


def test_a_model_is_measured_in_every_mode(monkeypatch, tmp_path):
    """Without a GPU: the small model of the other tests, and the reference executor."""
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    monkeypatch.setattr("tests.models.tower.start_process", lambda: None)
    monkeypatch.setattr(bench_packed, "TOKENS", (320, 480))
    out = tmp_path / "r.jsonl"
    assert bench_packed.main(["--models", "dense", "--repeats", "3", "--out", str(out)]) == 0
    records = read_records(out)
    modes = ("eager", "plugin", "plugin_4x")
    expected = [("dense_320", mode) for mode in (*modes, "plugin_layers")] + [("dense_480", mode) for mode in modes]
    assert [(one["case"], one["mode"]) for one in records] == expected
    for one in records:
        check_record(one)
        assert one["mode"] == "eager" or not one["fallbacks"]
        assert one["mode"] != "plugin" or one["bit_equal"]
    assert records[0]["gpu_busy_ms"] == 0 and records[2]["max_packed_seqs"] == 20
