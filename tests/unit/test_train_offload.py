"""Training with activations that leave graphs, in small and without a GPU: records and verdicts."""

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import train_offload
from scripts.performance.models import language_model
from scripts.performance.offload import cases, training

from .packs import new_model, pack


@pytest.fixture
def small(monkeypatch):
    """Let the script train a model of two layers on packs of 320 tokens; recompute asks for a GPU's random state."""
    for module in (training, train_offload):
        monkeypatch.setattr(module, "LOOKS", (2, 5))
    monkeypatch.setattr(cases, "RECOMPUTE", {"recompute_granularity": None})
    monkeypatch.setattr(training.Trainer, "peak", lambda self, **config: 0 if config else 1 << 24)
    monkeypatch.setattr(language_model, "build_model", lambda shape: new_model())

    def make_pack(lengths, seed):
        scaled = [max(length * 320 // sum(lengths), 1) for length in lengths]
        scaled[0] += 320 - sum(scaled)
        weights = torch.linspace(0.5, 1.5, 320)[None] / 320
        return language_model.Pack(pack(scaled, seed), tuple(scaled), weights)

    monkeypatch.setattr(language_model, "make_pack", make_pack)


def test_every_run_of_the_limit_has_a_record(small, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    assert train_offload.main(["--cases", "limit", "--steps", "4", "--out", str(out)]) == 1
    found = {r["mode"]: r for r in read_records(out)}
    assert list(found) == ["eager", "plugin", "eager_recompute", "eager_recompute_again", "plugin_mixed"]
    for record in found.values():
        check_record(record)
    # Without a GPU nothing runs out of memory, which is said; all else is as it should be.
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said if "should run out of memory" in line] == [
        "limit eager",
        "limit plugin",
    ]
    assert not [line for line in said if "differ from recompute's" in line]
    mixed = found["plugin_mixed"]
    assert mixed["replays"] == 16 and mixed["inside_spread"] and mixed["loss_rel"] <= 1e-5
    assert mixed["losses"][-1] < mixed["losses"][0]


def test_memory_of_many_steps_is_in_the_record(small, tmp_path):
    out = tmp_path / "r.jsonl"
    assert train_offload.main(["--cases", "flat", "--flat-steps", "7", "--out", str(out)]) == 0
    (record,) = read_records(out)
    check_record(record)
    assert list(record["memory_steps"]) == ["2", "5", "7"] and record["flat"]
    assert record["replays"] == 14 and record["pinned_gb"] > 0


@pytest.mark.parametrize("name", ["allocated_gb", "reserved_gb", "pinned_gb", "resident_gb"])
def test_memory_that_grows_is_seen(name):
    first = dict.fromkeys(("allocated_gb", "reserved_gb", "pinned_gb", "resident_gb"), 1.0)
    assert cases.is_flat({"memory_steps": {"10": first, "200": first}})
    assert not cases.is_flat({"memory_steps": {"10": first, "200": {**first, name: 1.1}}})


def test_a_run_that_trains_another_model_is_missed():
    record = {"case": "limit", "mode": "plugin_mixed", "inside_spread": False, "loss_rel": 0.1}
    assert "differ" in cases.misses([record])[0]


@pytest.mark.parametrize("words", [["--cases", "some"], ["--steps", "1"], ["--flat-steps", "100"]])
def test_what_cannot_be_trained_is_said(words, tmp_path, capsys):
    assert train_offload.main([*words, "--out", str(tmp_path / "r.jsonl")]) == 2
    assert "must be" in capsys.readouterr().err


def test_running_out_of_memory_leaves_nothing_of_the_run_behind():
    from weakref import ref

    from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture

    held = []

    def run(kind):
        tensor = torch.ones(3)
        held.append(ref(tensor))
        raise kind("short") from OutOfMemoryInCapture("short")

    for kind in (CaptureError, torch.OutOfMemoryError):
        with pytest.raises(training.OutOfSpace, match="short") as caught:
            training.fitting(lambda kind=kind: run(kind))
        assert caught.value.__context__ is None
    assert all(one() is None for one in held)
    with pytest.raises(CaptureError, match="other"):
        training.fitting(lambda: (_ for _ in ()).throw(CaptureError("other")))
