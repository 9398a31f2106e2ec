"""Training with activations that leave graphs, under a memory limit that nothing else keeps to."""

import pytest

from tests.gpu.offload_cases import RUN_OUT, limit_records, misses
from tests.gpu.offload_training import PACKS

pytestmark = pytest.mark.usefixtures("tower_module")


def test_packs_in_flight_train_with_a_memory_target_where_eager_and_plain_graphs_run_out_of_memory():
    records = list(limit_records(4))
    assert misses(records) == []
    found = {r["mode"]: r for r in records}
    for mode in RUN_OUT:
        assert "memory" in found[mode]["error"], found[mode]["error"]
    mixed = found["plugin_mixed"]
    assert mixed["replays"] == 4 * PACKS and mixed["pinned_gb"] > 0
    assert mixed["peak_gb"] <= mixed["limit_gb"]
