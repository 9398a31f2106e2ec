"""The benchmark of packed documents without a GPU, on small models."""

from unittest import mock

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import provenance, read_records
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from scripts.performance import bench_packed
from scripts.performance.records import check_record
from tests.models import language_model
from tests.models.language_model import Pack, draw, split

from . import packs


def record(**changes):
    made = {"case": "dense_2048", "mode": "plugin", "ms": 30.0, "ratio": 0.3, "fallbacks": {}, **provenance(3, 0)}
    exact = {"bit_equal": True, "forward_rel": 0.0, "grad_rel": 0.0, "forward_noise": 0.0, "grad_noise": 0.0}
    made |= {**exact, **changes}
    made = {name: value for name, value in made.items() if value is not None}
    check_record(made)
    return made


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"bit_equal": None, "grad_rel": 1.4e-3, "grad_noise": 1e-3}, ""),
        ({"bit_equal": None, "grad_rel": 1.6e-3, "grad_noise": 1e-3}, "gradients by 1.60e-03, eager runs by 1.00e-03"),
        ({"bit_equal": None, "forward_rel": float("nan")}, "losses differ by nan"),
        ({"bit_equal": False, "grad_rel": 1e-7}, "gradients by 1.00e-07"),
        ({"fallbacks": {"too_few_tokens": 1}}, "too_few_tokens"),
        ({"error": "CaptureError: no graph"}, "no graph"),
    ],
)
def test_what_differs_from_eager_is_named(changes, said):
    found = bench_packed.missed(record(**changes))
    assert found == "" if not said else said in found and found.startswith("dense_2048, plugin: ")


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


def full_capture():
    error = CaptureError("packed-sequence CUDA graphs could not be captured")
    error.__cause__ = OutOfMemoryInCapture("CUDA out of memory")
    return error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), full_capture()], ids=["eager", "graphs"]
)
def test_without_memory_to_add_up_in_one_order_runs_are_compared(monkeypatch, capsys, error):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    monkeypatch.setattr(bench_packed, "TOKENS", (320,))
    bench = bench_packed.Bench("dense", 3)
    monkeypatch.setattr(bench, "_to_the_bit", mock.Mock(side_effect=error))
    _, plugin, *_ = bench.records(320)
    assert "bit_equal" not in plugin and plugin["grad_rel"] == plugin["grad_noise"] == plugin["forward_rel"] == 0
    assert f"dense_320: not compared to the bit: {type(error).__name__}" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_failure_to_capture_is_the_records_error(monkeypatch):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    monkeypatch.setattr(bench_packed, "TOKENS", (320,))
    bench = bench_packed.Bench("dense", 3)
    monkeypatch.setattr(bench, "_to_the_bit", mock.Mock(side_effect=CaptureError("no graph")))
    plugin = list(bench.records(320))[1]
    assert plugin["error"] == "CaptureError: no graph"


def test_a_run_that_fails_leaves_no_graphs(monkeypatch):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    bench = bench_packed.Bench("dense", 3)
    replays = bench._replayed(small_pack((100, 220)), 5, (), 2)
    next(replays)
    assert "forward" in vars(bench.model.decoder)
    monkeypatch.setattr(bench, "_results", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        next(replays)
    assert "forward" not in vars(bench.model.decoder)


def test_lengths_add_up():
    assert split(2048, 5) == (410, 410, 410, 409, 409)
    for documents in (1, 7, 24):
        lengths = draw(1500, documents, documents)
        assert sum(lengths) == 1500 and len(lengths) == documents and min(lengths) >= 1
