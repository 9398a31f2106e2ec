"""The benchmark of encoders on a GPU, a few layers deep: every mode gives a time and parity, graphs save the host."""

import pytest

from scripts.performance import bench_vision
from scripts.performance.records import check_record, read_records
from tests.models.encoders import ENCODERS

LAYERS = 4
CASES = [(name, case) for name, kind in ENCODERS.items() for case in kind.sizes if case not in ("video16", "1x2048")]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("encoders") / "r.jsonl"
    cases = ",".join(dict.fromkeys(case for _, case in CASES))
    line = ["--encoders", ",".join(ENCODERS), "--cases", cases, "--layers", str(LAYERS), "--repeats", "3"]
    assert bench_vision.main([*line, "--out", str(out)]) == 0
    found = read_records(out)
    for one in found:
        check_record(one)
    return {(r["case"], r["mode"]): r for r in found}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_times_are_recorded_beside_eagers(records, name, case):
    eager = records[f"{name}_{case}_{LAYERS}layers", "eager"]
    for mode in ENCODERS[name].modes:
        plugin = records[f"{name}_{case}_{LAYERS}layers", mode]
        assert plugin["ratio"] == plugin["ms"] / eager["ms"] and plugin["ratio"] < 1.1
        assert plugin["host_ms"] < eager["host_ms"]
        assert not plugin["fallbacks"] and plugin["kernels"] > 50
        assert 0 < plugin["gpu_busy_ms"] < 1.5 * plugin["ms"]


@pytest.mark.parametrize("case", ["1x448", "4x448"])
def test_the_plugin_is_right_and_faster(records, case):
    plugin, fast = (records[f"qwen3_vl_{case}_{LAYERS}layers", mode] for mode in ("plugin", "plugin_fast"))
    assert plugin["bit_equal"] and fast["forward_rel"] <= 2e-3
    assert plugin["grad_rel"] <= max(1.5 * plugin["grad_noise"], 2e-3)
    assert plugin["ratio"] < 1 and fast["ratio"] < 1
