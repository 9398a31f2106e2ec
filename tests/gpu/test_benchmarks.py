"""The vision benchmark on a GPU: every mode that must work gives a time, and what is wrong is measured to be."""

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_vision


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "r.jsonl"
    modes = "eager,plugin,plugin_te_attention,plugin_fast,plugin_streams,upstream,limit"
    line = ["--out", str(out), "--modes", modes, "--cases", "1x448,4x448", "--tokens", "", "--repeats", "3"]
    assert bench_vision.main([*line, "--seconds", "240"]) == 0
    found = read_records(out)
    for one in found:
        check_record(one)
    return {(r["case"], r["mode"]): r for r in found}


@pytest.mark.parametrize("case", ["1x448", "4x448"])
@pytest.mark.parametrize(
    "mode", ["eager", "plugin", "plugin_te_attention", "plugin_fast", "plugin_streams", "upstream"]
)
def test_every_mode_is_measured(records, case, mode):
    r = records[case, mode]
    assert "error" not in r, r["error"]
    # No mode is faster than arithmetic, nor busy for longer than it takes by more than the profiler's own cost.
    assert r["ms"] > records[case, "limit"]["ms"]
    assert 0 < r["gpu_busy_ms"] < 1.5 * r["ms"]
    assert 100 < r["kernels"] < 10_000
    assert r["families"]["matrix products"] > 0


@pytest.mark.parametrize("case", ["1x448", "4x448"])
def test_the_plugin_is_right_and_faster(records, case):
    plugin, fast = records[case, "plugin"], records[case, "plugin_fast"]
    assert plugin["bit_equal"] and fast["forward_rel"] <= 2e-3
    assert plugin["grad_rel"] <= max(1.5 * plugin["grad_noise"], 2e-3)
    assert plugin["ratio"] < 1 and fast["ratio"] < 1
    assert plugin["host_ms"] < records[case, "eager"]["host_ms"]


@pytest.mark.parametrize("case", ["1x448", "4x448"])
def test_upstreams_graphs_are_wrong_and_flagged(records, case):
    upstream = records[case, "upstream"]
    assert "another function" in upstream["wrong"]
    assert upstream["forward_rel"] > 0.1 and upstream["grad_rel"] > 0.1
