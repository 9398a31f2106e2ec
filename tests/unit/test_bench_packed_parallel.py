"""What the benchmark of packs over two GPUs makes of what its ranks found."""

import pytest

from examples.photographs.processes import TrainingFailed
from scripts.performance import bench_packed_parallel as bench
from scripts.performance.results import check_record, read_records


def rank(**changes):
    found = {
        "far": {"(512, 512)": [0.0, 0.0]},
        "replays": 2,
        "fallbacks": {"too_many_tokens": 1},
        "beyond": ["too_many_tokens"],
        "ms": {"2048": {"eager": 100.0, "plugin": 50.0}},
    }
    return {**found, **changes}


GOOD = {"ranks": [rank(), rank(ms={"2048": {"eager": 90.0, "plugin": 60.0}})]}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"failing": bench.FAILED}, None),
        ({"failing": {}}, "where one rank cannot capture"),
        ({"far": {"(512, 512)": [0.0, 1e-6]}}, "differs from eager"),
        ({"ms": {"2048": {"eager": 50.0, "plugin": 50.0}}}, "50.0 ms, eager 50.0 ms"),
        ({"fallbacks": {}}, "wanted each of"),
        ({"replays": 3}, "ranks chose otherwise"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes, said):
    missed = bench.misses({"ranks": [rank(), rank(**changes)]})
    assert missed == [] if said is None else any(said in miss for miss in missed)


@pytest.fixture
def run(monkeypatch, tmp_path):
    out = tmp_path / "r.jsonl"

    class Process:
        """CP2 fails; what came before it must have its records by then."""

        wait_until_ready = close = lambda self: None

        def __init__(self, log, gpus, devices, module):
            assert (log, gpus, list(devices), module) == (None, 2, [0, 1], bench.MODULE)

        def train(self, mode, words, limit_s):
            assert limit_s == bench.LIMIT_S and "--fault" not in words
            if words[1] != "CP2":
                return GOOD
            assert {r["case"].partition("_")[0] for r in read_records(out)} == {"TP2"}
            raise TrainingFailed("process 1 of 2 ended with status 1", "the last lines")

    monkeypatch.setattr(bench, "TrainingProcess", Process)
    monkeypatch.setattr("sys.argv", ["bench_packed_parallel.py", "--out", str(out)])
    return bench.main(), read_records(out)


def test_a_layouts_records_are_there_before_the_next_begins(run):
    status, records = run
    assert status == 1
    for record in records:
        check_record(record)
    by_case = {(r["case"], r["mode"]): r for r in records}
    for layout in ("TP2", "TP2_sequence"):
        assert by_case[layout, "plugin_deterministic"]["replays"] == 2
        assert by_case[f"{layout}_2048", "eager"]["ms"] == 100.0  # the slower rank's
        assert by_case[f"{layout}_2048", "plugin"]["ratio"] == 0.6
    assert "the last lines" in by_case["CP2", "plugin"]["error"]
