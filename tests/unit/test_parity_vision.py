"""The parity run with buckets that appear while steps run, on the small tower."""

import pytest

from bridge_cg_plugin.cli.runs.results import check_record
from scripts.performance.vision import parity

MIXES = {
    "one": [(1, 4, 6)],
    "two": [(1, 8, 8), (1, 4, 4)],
    "video": [(4, 6, 4)],
    "too many tokens": [(1, 40, 40)],
}


@pytest.fixture
def records(monkeypatch):
    monkeypatch.setattr(parity, "mixes", lambda: MIXES)
    monkeypatch.setattr(parity, "BUCKETS", (4, 1024))
    return parity.measure(2, on_demand=True)


def test_mixes_are_replayed_from_buckets_that_they_asked_for(records):
    for record in records:
        check_record(record)
        assert record["mode"] == "plugin_on_demand"
    found = {record["case"]: record for record in records}
    assert found.keys() == MIXES.keys()
    assert {name for name, record in found.items() if record["bucket"]} == MIXES.keys() - {"too many tokens"}
    assert found["too many tokens"]["fallback"] == "too_many_tokens"
    # The reference executor rounds as eager does.
    assert all(record["forward_rel"] <= 1e-5 and record["grad_rel"] <= 1e-4 for record in records)


def test_a_mix_that_no_bucket_was_recorded_for_is_a_failure(monkeypatch, records):
    assert not [said for said in parity.failures(records) if "no bucket" in said]
    monkeypatch.setattr(parity, "MOST_ROUNDS", 0)
    early = parity.measure(1, on_demand=True)
    assert [said for said in parity.failures(early) if "no bucket was recorded for it" in said]


def test_each_way_replaces_its_own_records():
    every = [{"mode": mode} for mode in ("plugin", "plugin_deterministic", "plugin_on_demand")]
    assert parity.without_modes(every, on_demand=True) == every[:2]
    assert parity.without_modes(every, on_demand=False) == every[2:]
