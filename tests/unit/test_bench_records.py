"""Records of benchmarks: their form, and the page of their tables."""

from pathlib import Path

import pytest

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import records, tables

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
ORIGIN = {
    "repeats": 9,
    "seed": 0,
    "date": "2026-11-21",
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "commit": "abc"},
    "command": "python x.py",
}


def record(case="1x448", mode="eager", **fields):
    return {"case": case, "mode": mode, "tokens": 784, "images": 1, "ms": 75.0, "ratio": 1.0, **ORIGIN, **fields}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda p: p.name)
def test_committed_records_are_as_the_format_says(path):
    found = read_records(path)
    assert found
    for one in found:
        records.check_record(one)


@pytest.mark.parametrize("missing", records.REQUIRED)
def test_a_record_says_where_it_comes_from(missing):
    one = record()
    del one[missing]
    with pytest.raises(ValueError, match=f"{missing} missing"):
        records.check_record(one)


def test_a_record_replaces_the_one_of_its_case_and_mode(tmp_path):
    path = tmp_path / "r.jsonl"
    for one in (record(), record(mode="plugin"), record(case="8mix"), record(ms=70.0)):
        records.put_record(path, one)
    found = {(r["case"], r["mode"]): r["ms"] for r in read_records(path)}
    assert found == {("1x448", "eager"): 70.0, ("1x448", "plugin"): 75.0, ("8mix", "eager"): 75.0}
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_gpu_measured_records_cannot_be_replaced_by_accident():
    with pytest.raises(ValueError, match="without a GPU. Pass --out FILE"):
        records.output_path(None, "vision_bench.jsonl")
    assert records.output_path(Path("x.jsonl"), "vision_bench.jsonl") == Path("x.jsonl")


def test_the_page_is_that_of_the_records():
    text = (FOLDER / "README.md").read_text()
    assert tables.page(FOLDER, text) == text, "run scripts/performance/tables.py"
    assert all(f"\n## {each.title}\n" in text for each in tables.TABLES)
