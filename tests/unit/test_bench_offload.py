"""The benchmark of offloading and recompute without a GPU, on the small tower."""

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_offload
from scripts.performance.models import language_model
from scripts.performance.offload import packs
from scripts.performance.offload.replays import Replays

from .packs import EXPERTS, ON_CPU, new_model, pack


def test_every_mode_of_a_case_has_a_record(tmp_path, capsys):
    out = tmp_path / "offload.jsonl"
    words = ["--cases", "tokens_64", "--slots", "2", "--targets", "0.9,0.5", "--repeats", "3", "--out", str(out)]
    assert bench_offload.main(words) == 0
    found = {r["mode"]: r for r in read_records(out)}
    assert list(found) == ["none", "offload", "recompute", "mixed_90", "mixed_50"]
    for one in found.values():
        check_record(one)
        assert one["slots"] == 2 and one["tokens"] == 64
    assert found["none"]["ratio"] == found["none"]["memory_ratio"] == 1.0
    for mode in ("none", "offload", "recompute"):
        assert found[mode]["bit_equal"] and found[mode]["grad_rel"] == 0 and not found[mode]["fallbacks"]
    assert "outputs equal" in capsys.readouterr().out


def test_modes_take_turns_and_the_fastest_time_counts(tmp_path, monkeypatch):
    taken = iter([8.0, 12.0, 12.0, 10.0, 6.0, 9.0])
    first = Replays.mode
    monkeypatch.setattr(Replays, "mode", lambda self, options: slowed(first(self, options), next(taken)))
    out = tmp_path / "offload.jsonl"
    words = ["--cases", "tokens_64", "--targets", "", "--repeats", "3", "--rounds", "2"]
    assert bench_offload.main([*words, "--out", str(out)]) == 0
    found = {r["mode"]: (r["ms"], r["ratio"]) for r in read_records(out)}
    assert found == {"none": (8.0, 1.0), "offload": (6.0, 0.75), "recompute": (9.0, 1.125)}


def test_a_faster_baseline_changes_every_ratio(tmp_path, monkeypatch):
    taken = iter([10.0, 12.0, 8.0, 13.0])
    first = Replays.mode
    monkeypatch.setattr(Replays, "mode", lambda self, options: slowed(first(self, options), next(taken)))
    out = tmp_path / "offload.jsonl"
    words = ["--cases", "tokens_64", "--modes", "none,offload", "--targets", "", "--repeats", "3", "--rounds", "2"]
    assert bench_offload.main([*words, "--out", str(out)]) == 0
    assert {r["mode"]: r["ratio"] for r in read_records(out)} == {"none": 1.0, "offload": 1.5}


def slowed(measured, ms):
    record, found = measured
    return {**record, "ms": ms}, found


def test_parts_of_layers_are_cases_of_their_own(tmp_path, monkeypatch):
    from bridge_cg_plugin.options import VisionGraphOptions

    out = tmp_path / "offload.jsonl"
    monkeypatch.setattr(VisionGraphOptions, "__init__", small_activations_leave(VisionGraphOptions.__init__))
    words = ["--cases", "tokens_64", "--modules", "attn", "--targets", "", "--repeats", "3", "--out", str(out)]
    assert bench_offload.main(words) == 0
    found = {r["mode"]: r for r in read_records(out)}
    assert list(found) == ["none", "offload", "recompute"]
    for one in found.values():
        check_record(one)
        assert one["case"] == "tokens_64_attn" and one["bit_equal"] and one["grad_rel"] == 0 and not one["fallbacks"]
    assert found["offload"]["pinned_gb"] > 0


def small_activations_leave(init):
    """Return a constructor of options with which activations of a small tower leave, too."""
    return lambda self, **options: init(self, **{"offload_min_bytes": 1024, **options})


def test_packs_with_experts_are_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "TOKENS", 320)
    monkeypatch.setattr(language_model, "build_model", lambda shape: new_model(**EXPERTS, cuda_graph_modules=[]))

    def make_pack(lengths, seed):
        weights = torch.linspace(0.5, 1.5, 320)[None] / 320
        return language_model.Pack(pack(lengths, seed), tuple(lengths), weights)

    monkeypatch.setattr(language_model, "make_pack", make_pack)
    monkeypatch.setattr(packs, "TUNING", {"offload_min_bytes": 1024})
    out = tmp_path / "offload.jsonl"
    words = ["--cases", "experts_8192", "--slots", "2", "--targets", "0.9", "--repeats", "3", "--out", str(out)]
    with ON_CPU():
        assert bench_offload.main(words) == 0
    found = {r["mode"]: r for r in read_records(out)}
    assert list(found) == ["none", "offload", "recompute", "mixed_90"]
    for one in found.values():
        check_record(one)
        assert one["slots"] == 2 and one["documents"] == packs.DOCUMENTS
    for one in (found[mode] for mode in ("none", "offload", "recompute")):
        assert one["bit_equal"] and one["grad_rel"] == 0 and not one["fallbacks"]
    assert found["offload"]["pinned_gb"] > 0 == found["recompute"]["pinned_gb"]


@pytest.mark.parametrize(
    "words",
    [
        ["--modes", "offload"],
        ["--modes", "none,everything"],
        ["--targets", "1.5"],
        ["--targets", "0"],
        ["--slots", "0"],
        ["--rounds", "0"],
        ["--cases", "2x999"],
        ["--cases", "tokens_100"],
    ],
)
def test_what_cannot_be_measured_is_said(words, tmp_path, capsys):
    assert bench_offload.main([*words, "--out", str(tmp_path / "r.jsonl")]) == 2
    assert "must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_when_time_is_up_the_rest_says_so(tmp_path):
    out = tmp_path / "offload.jsonl"
    assert bench_offload.main(["--cases", "tokens_64", "--seconds", "0", "--out", str(out)]) == 0
    (record,) = read_records(out)
    assert record["mode"] == "none" and "--seconds" in record["error"]
