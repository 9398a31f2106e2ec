"""What the benchmark of packs over two GPUs makes of what its ranks found."""

import subprocess
import sys
import threading
import time

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_packed_parallel
from scripts.performance.packed import parallel as bench
from scripts.performance.packed import ranks
from scripts.performance.processes import TrainingFailed


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
        ({"far": {"0": [0.1, 0.1]}, "from_fp32": {"graphs": [1.04, 2.0], "eager": [1.0, 2.0]}}, None),
        ({"from_fp32": {"graphs": [1.0, 2.2], "eager": [1.0, 2.0]}}, "is from fp32"),
        ({"from_fp32": {"graphs": [1.0, float("nan")], "eager": [1.0, 2.0]}}, "is from fp32"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes, said):
    missed = bench.misses({"ranks": [rank(), rank(**changes)]})
    assert missed == [] if said is None else any(said in miss for miss in missed)


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Processes that measure nothing; the list of (layout, devices, cores, others beside it), after who fails.

    On four GPUs TP2 ends after CP2, TP2_sequence once TP2 has its records, CP2_a2a after it, and CP2_images last.
    """
    asked, lock, busy, pairs = [set()], threading.Lock(), set(), set()
    begun, ended, others, last = threading.Barrier(2), *(threading.Event() for _ in range(3))

    class Process:
        wait_until_ready = close = lambda self: None

        def __init__(self, log, gpus, devices, module):
            assert (log, gpus, module) == (None, len(devices), bench.MODULE)
            self._devices = devices
            pairs.add(devices)

        def keep_to(self, cores):
            self._cores = [set(own) for own in cores]

        def train(self, mode, words, limit_s):
            limit = bench.LONG_LIMIT_S if words[1] in (*bench.HYBRIDS, *bench.EXPERTS) else bench.LIMIT_S
            assert (mode, limit_s) == ("graphs", limit) and "--fault" not in words
            assert len(self._devices) == (4 if words[1] in bench.FOUR_GPUS else 2)
            if words[1] == "CP2_a2a" and len(pairs) > 1:
                assert others.wait(10)
            if words[1] == "CP2_images" and len(pairs) > 1:
                assert last.wait(10)
            with lock:
                assert not busy & set(self._devices), "another layout has the GPUs"
                busy.update(self._devices)
            if words[1] in ("TP2", "CP2") and len(pairs) > 1:
                begun.wait(10)
                assert words[1] == "CP2" or ended.wait(10)
            if words[1] == "TP2_sequence":
                self._wait_for_records()
            with lock:
                asked.append((words[1], self._devices, self._cores, len(busy) - 2))
                busy.difference_update(self._devices)
            if words[1] == "CP2":
                ended.set()
            if words[1] == "TP2_sequence":
                others.set()
            if words[1] == "CP2_a2a":
                last.set()
            if words[1] in asked[0]:
                raise TrainingFailed("process 1 of 2 ended with status 1", "the last lines")
            return GOOD

        def _wait_for_records(self):
            end = time.monotonic() + 10
            while not any(record["case"] == "TP2" for record in read_records(tmp_path / "r.jsonl")):
                assert time.monotonic() < end, "TP2 has ended, and has no records"
                time.sleep(0.01)

    monkeypatch.setattr(bench, "TrainingProcess", Process)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    return asked


def run(monkeypatch, out, *words):
    monkeypatch.setattr("sys.argv", ["bench_packed_parallel.py", "--out", str(out), *words])
    return bench_packed_parallel.main(), read_records(out)


def test_layouts_go_side_by_side_on_gpus_of_their_own(processes, monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path / "r.jsonl", "--gpus", "4")[0] == 0
    assert [(layout, devices, beside) for layout, devices, _, beside in processes[1:]] == [
        ("CP2", (2, 3), 2),
        ("TP2", (0, 1), 0),
        ("TP2_sequence", (0, 1), 0),
        ("CP2_a2a", (2, 3), 0),
        ("CP2_images", (0, 1), 0),
    ]
    for _, devices, cores, _ in processes[1:]:
        assert cores == [set(range(12 * device, 12 * device + 12)) for device in devices]


@pytest.mark.parametrize("gpus", ["2", "3"])
def test_layouts_go_in_turn_on_two_gpus(processes, monkeypatch, tmp_path, gpus):
    assert run(monkeypatch, tmp_path / "r.jsonl", "--gpus", gpus)[0] == 0
    assert [(layout, devices, beside) for layout, devices, _, beside in processes[1:]] == [
        (layout, (0, 1), 0) for layout in bench.LAYOUTS
    ]


def test_one_layout_may_be_asked_for(processes, monkeypatch, tmp_path):
    status, records = run(monkeypatch, tmp_path / "r.jsonl", "--gpus", "2", "--layouts", "CP2")
    assert status == 0 and {r["case"] for r in records} == {"CP2", "CP2_2048"}


def test_layouts_of_hybrids_and_of_four_gpus(processes, monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path / "h.jsonl", "--gpus", "2", "--layouts", *bench.EXPERTS, *bench.HYBRIDS)[0] == 0
    assert run(monkeypatch, tmp_path / "f.jsonl", "--gpus", "4", "--layouts", *bench.FOUR_GPUS)[0] == 0
    assert [devices for _, devices, _, _ in processes[1:]] == [(0, 1)] * 4 + [(0, 1, 2, 3)]
    with pytest.raises(ValueError, match="--gpus 2: it must be 4 or more"):
        run(monkeypatch, tmp_path / "n.jsonl", "--gpus", "2", "--layouts", *bench.FOUR_GPUS)


@pytest.mark.parametrize("name", ranks.LAYOUTS)
def test_every_layout_has_thirty_packs_that_its_ranks_can_share(name):
    layout = ranks.LAYOUTS[name]
    assert name in (*bench.LAYOUTS, *bench.EXPERTS, *bench.HYBRIDS, *bench.FOUR_GPUS)
    packs = layout.packs
    assert len(packs) == (5 if layout.sequence else 35)
    for lengths in packs.values():
        tokens = sum(lengths)
        assert tokens <= ranks.BUCKETS[-1] and len(lengths) <= ranks.MAX_SEQS
        assert all(length and length % (2 * layout.context) == 0 for length in lengths)
        assert tokens in ranks.BUCKETS or (tokens > 256 * layout.context and not layout.sequence)


def test_fewer_than_two_gpus_are_refused(processes, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--gpus 1: it must be 2 or more"):
        run(monkeypatch, tmp_path / "r.jsonl", "--gpus", "1")


def test_a_layouts_records_are_there_before_the_next_ends(processes, monkeypatch, tmp_path):
    processes[0].add("TP2_sequence")
    status, records = run(monkeypatch, tmp_path / "r.jsonl", "--gpus", "4")
    assert status == 1
    for record in records:
        check_record(record)
    by_case = {(r["case"], r["mode"]): r for r in records}
    for layout in ("TP2", "CP2"):
        assert by_case[layout, "plugin_deterministic"]["replays"] == 2
        assert by_case[f"{layout}_2048", "eager"]["ms"] == 100.0  # the slower rank's
        assert by_case[f"{layout}_2048", "plugin"]["ratio"] == 0.6
    assert "the last lines" in by_case["TP2_sequence", "plugin"]["error"]
    processes[0].clear()
    status, records = run(monkeypatch, tmp_path / "r.jsonl", "--gpus", "4", "--layouts", "TP2_sequence")
    assert status == 0 and not any("error" in record for record in records) and len(records) == 15


@pytest.mark.parametrize("script", ["bench_parallel", "bench_packed_parallel"])
def test_processes_start_before_pytorch_is_imported(script):
    code = f"import sys, scripts.performance.{script}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
