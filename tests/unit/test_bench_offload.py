"""The benchmark of offloading and recompute without a GPU, on small models."""

import pytest

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_offload
from scripts.performance.records import check_record


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


@pytest.mark.parametrize(
    "words", [["--modes", "everything"], ["--targets", "1.5"], ["--targets", "0"], ["--slots", "0"], ["--cases", "2x9"]]
)
def test_what_cannot_be_measured_is_said(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_offload.parse(words)
    assert "must be" in capsys.readouterr().err
