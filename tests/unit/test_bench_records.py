"""Records of benchmarks: their form, and the page of their tables."""

import re
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


@pytest.mark.parametrize(
    "change, said",
    [
        ({"gpu": None}, "gpu"),
        ({"speed": 3}, "unknown field 'speed'"),
    ],
)
def test_other_records_are_refused(change, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        records.put_record(tmp_path / "r.jsonl", record(**change))
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("missing", records.REQUIRED)
def test_a_record_says_where_it_comes_from(missing):
    one = record()
    del one[missing]
    with pytest.raises(ValueError, match=f"{missing} missing"):
        records.check_record(one)


def test_a_record_has_a_measurement_or_an_error():
    one = record()
    del one["ms"]
    with pytest.raises(ValueError, match="neither a measurement"):
        records.check_record(one)
    records.check_record({**one, "error": "out of memory"})


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


def test_a_table_has_a_row_for_each_case_and_mode_beside_eager_and_no_empty_column():
    found = [record(), record(mode="plugin", ms=12.34, ratio=0.165, bit_equal=True, grad_rel=1.2e-3)]
    columns = (
        tables.Column("tokens", "tokens"),
        tables.EAGER_MS,
        *(tables.MS, tables.RATIO, tables.GIB),
        tables.Column("bit-equal", "bit_equal"),
        tables.Column("gradients", "grad_rel"),
    )
    assert tables.table(found, columns, ("plugin",)).splitlines() == [
        "| case | tokens | eager ms | graphs ms | ratio | bit-equal | gradients |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1x448 | 784 | 75 | 12.3 | 0.165 | True | 1.2e-03 |",
    ]
    found.append(record(case="8mix_27layers", mode="plugin_packed", ms=3.0))
    assert tables.table(found, columns[1:3], ("plugin", "plugin_packed")).splitlines()[2:] == [
        "| 1x448 | plugin | 75 | 12.3 |",
        "| 8mix | plugin_packed |  | 3 |",
    ]


def test_the_default_mode_has_two_streams_for_few_tokens_only():
    small = [
        record(mode=mode, ms=ms) for mode, ms in (("eager", 75.0), ("plugin_streams", 10.0), ("plugin_fast", 11.0))
    ]
    large = [{**one, "case": "8mix", "tokens": 6720} for one in small]
    columns = (tables.MS, tables.Column("ratio", "over_eager"))
    assert tables.table(tables.with_default([*small, *large]), columns, ("default",)).splitlines()[2:] == [
        "| 1x448 | 10 | 0.133 |",
        "| 8mix | 11 | 0.147 |",
    ]


def test_where_it_was_measured_is_said_once():
    later = record(date="2026-11-22", gpu="none", versions={"commit": "def"})
    assert tables.origin([record(), later]) == "NVIDIA H200 and no GPU, 2026-11-21 to 2026-11-22, commit abc, def."


def test_a_page_without_records_keeps_what_is_written_by_hand(tmp_path):
    assert tables.page(tmp_path, f"old\n{tables.NOTES}* one\n") == f"{tables.HEAD}\n{tables.NOTES}* one\n"
