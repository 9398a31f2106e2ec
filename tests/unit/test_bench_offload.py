"""The benchmark of offloading and recompute without a GPU, on small models."""

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import read_records
from bridge_cg_plugin.options import VisionGraphOptions
from scripts.performance import bench_offload
from scripts.performance.records import check_record
from tests.models import language_model

from .packs import EXPERTS, ON_CPU, new_model, pack


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a function that measures a case and returns its records by mode."""
    monkeypatch.setitem(bench_offload.SLOTS, "tokens_64", 1)

    def run(case, *words):
        out = tmp_path / "offload.jsonl"
        assert bench_offload.main(["--cases", case, "--repeats", "3", "--out", str(out), *words]) == 0
        found = {r["mode"]: r for r in read_records(out)}
        for one in found.values():
            check_record(one)
        for one in (found[mode] for mode in ("none", "offload", "recompute")):
            assert one["bit_equal"] and one["grad_rel"] == 0 and not one["fallbacks"]
        return found

    return run


def test_every_mode_of_a_case_has_a_record(measured, capsys):
    found = measured("tokens_64", "--slots", "2", "--targets", "0.9,0.5")
    assert list(found) == ["none", "offload", "recompute", "mixed_90", "mixed_50"]
    assert all(one["slots"] == 2 and one["tokens"] == 64 for one in found.values())
    assert found["none"]["ratio"] == found["none"]["memory_ratio"] == 1.0
    assert "outputs equal" in capsys.readouterr().out


def test_parts_of_layers_are_cases_of_their_own(measured, monkeypatch):
    first = VisionGraphOptions.__init__  # activations of a small tower leave, too
    leaving = lambda self, **options: first(self, **{"offload_min_bytes": 1024, **options})  # noqa: E731
    monkeypatch.setattr(VisionGraphOptions, "__init__", leaving)
    found = measured("tokens_64", "--modules", "attn", "--targets", "")
    assert {one["case"] for one in found.values()} == {"tokens_64_attn"} and found["offload"]["pinned_gb"] > 0


def test_packs_with_experts_are_a_case(measured, monkeypatch):
    def make_pack(lengths, seed):
        weights = torch.linspace(0.5, 1.5, 320)[None] / 320
        return language_model.Pack(pack(lengths, seed), tuple(lengths), weights)

    monkeypatch.setattr(bench_offload, "PACK_TOKENS", 320)
    monkeypatch.setattr(bench_offload, "TUNING", {"offload_min_bytes": 1024})
    monkeypatch.setattr(language_model, "build_model", lambda shape: new_model(**EXPERTS, cuda_graph_modules=[]))
    monkeypatch.setattr(language_model, "make_pack", make_pack)
    with ON_CPU():
        found = measured("experts_8192", "--slots", "2", "--targets", "0.9")
    assert list(found) == ["none", "offload", "recompute", "mixed_90"]
    assert found["offload"]["pinned_gb"] > 0 == found["recompute"]["pinned_gb"]


@pytest.mark.parametrize(
    "words", [["--modes", "everything"], ["--targets", "1.5"], ["--targets", "0"], ["--slots", "0"], ["--cases", "2x9"]]
)
def test_what_cannot_be_measured_is_said(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_offload.parse(words)
    assert "must be" in capsys.readouterr().err
