"""The benchmark of encoders on a GPU, a few layers deep: every mode gives a time, and graphs save the host's."""

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_encoders
from scripts.performance.models.encoders import ENCODERS

LAYERS = 4


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("encoders") / "r.jsonl"
    assert bench_encoders.main(["--layers", str(LAYERS), "--repeats", "3", "--out", str(out)]) == 0
    found = read_records(out)
    for one in found:
        check_record(one)
    return {(r["case"], r["mode"]): r for r in found}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, kind in ENCODERS.items() for case in kind.sizes])
def test_times_are_recorded_beside_eagers(records, name, case):
    eager = records[f"{name}_{case}_{LAYERS}layers", "eager"]
    for mode in ENCODERS[name].modes:
        plugin = records[f"{name}_{case}_{LAYERS}layers", mode]
        assert plugin["ratio"] == plugin["ms"] / eager["ms"] and plugin["ratio"] < 1.1
        assert plugin["host_ms"] < eager["host_ms"]
        assert not plugin["fallbacks"] and plugin["kernels"] > 50
