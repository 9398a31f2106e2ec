"""Training with activations that leave graphs: under a memory limit that nothing else keeps to, and for many steps."""

import pytest

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import train_offload
from scripts.performance.offload.cases import RUN_OUT
from scripts.performance.offload.training import PACKS

pytestmark = pytest.mark.usefixtures("tower_module")


def test_packs_in_flight_train_with_a_memory_target_where_eager_and_plain_graphs_run_out_of_memory(tmp_path):
    out = tmp_path / "limit.jsonl"
    assert train_offload.main(["--cases", "limit", "--steps", "4", "--out", str(out)]) == 0
    found = {r["mode"]: r for r in read_records(out)}
    for mode in RUN_OUT:
        assert "memory" in found[mode]["error"], found[mode]["error"]
    mixed = found["plugin_mixed"]
    assert mixed["replays"] == 4 * PACKS and mixed["pinned_gb"] > 0
    assert mixed["peak_gb"] <= mixed["limit_gb"]


def test_two_hundred_steps_take_no_more_device_or_host_memory(tmp_path):
    out = tmp_path / "flat.jsonl"
    assert train_offload.main(["--cases", "flat", "--out", str(out)]) == 0
    (record,) = read_records(out)
    assert record["flat"] and record["memory_steps"]["200"]["pinned_gb"] > 0 and record["replays"] == 400
