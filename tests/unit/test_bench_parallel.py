"""bench_parallel.py without a GPU: what runs where, and what is recorded."""

import itertools
import threading
import time
from collections import Counter

import pytest

from examples.photographs.processes import TrainingFailed
from scripts.performance import bench_parallel, layout_runs
from scripts.performance.layouts_page import layout_parts
from scripts.performance.results import check_record, read_records


@pytest.mark.parametrize(
    "sizes, gpus, expected",
    [
        ([2, 2, 2], 4, [(0, 1), (2, 3), (0, 1)]),
        ([4, 2, 1, 1], 4, [(0, 1, 2, 3), (0, 1), (0,), (1,)]),
        ([2, 2], 3, [(0, 1), (0, 1)]),
    ],
)
def test_layouts_go_side_by_side(sizes, gpus, expected):
    assert layout_runs.place(sizes, gpus) == expected


@pytest.fixture
def started(monkeypatch):
    """Processes that train nothing; the list of (mode, words, devices, others beside it), after who fails."""
    asked, lock, busy = [], threading.Lock(), Counter()
    failing = []

    class Process:
        def __init__(self, log, ranks, devices):
            assert len(set(devices)) == len(devices) <= ranks
            self._ranks, self._devices = range(ranks), devices

        def wait_until_ready(self):
            pass

        def train(self, mode, words, limit_s=None):
            with lock:
                beside = max(busy[device] for device in self._devices)
                busy.update(self._devices)
                asked.append((mode, tuple(words), self._devices, beside))
            time.sleep(0.02)
            with lock:
                busy.subtract(self._devices)
            if "--tensor-parallel" in words and "TP2" in failing:
                raise TrainingFailed("process 1 of 2 ended with status 1: no", "RuntimeError: out of memory")
            steps = int(words[words.index("--steps") + 1])
            samples = int(words[words.index("--global-batch") + 1])
            grown = samples if "grow" in failing else 0
            graphs = {"replays": samples, "fallbacks": {}, "memory_bytes": 2**30 + grown * 2**22}
            graphs = graphs if mode == "graphs" else None
            ranks = [{"rank": i, "peak_gb": 1.0 + i, "step_ms": [], "graphs": graphs} for i in self._ranks]
            ms = 5.0 if len(self._devices) == 1 else 8.0 if mode == "eager" else 6.25
            run = {"losses": [2.0] * steps, "grad_norms": [1.0] * steps, "step_ms": [ms] * steps}
            return {**run, "peak_gb": 2.0, "graphs": graphs, "ranks": ranks}

        def close(self):
            pass

    monkeypatch.setattr(bench_parallel, "TrainingProcess", Process)
    asked.append(failing)
    return asked


def test_every_layout_gives_a_record_of_each_run(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "4", "--steps", "8", "--out", str(out), "--small", "--layouts", "TP2", "DP2", "TP2xPP2"]
    assert bench_parallel.main(words) == 0
    records = read_records(out)
    for record in records:
        check_record(record)
    found = {(r["case"], r["mode"]) for r in records}
    assert found == {(f"{c}_small", m) for c in ("TP2", "DP2", "TP2xPP2") for m in ("eager1", "eager2", "plugin")}
    plugin = next(r for r in records if (r["case"], r["mode"]) == ("TP2_small", "plugin"))
    assert (plugin["ratio"], plugin["inside_spread"], len(plugin["rank_peak_gb"])) == (6.25 / 8.0, True, 2)
    assert all("--loader-workers" in w for _, w, *_ in started[1:])


def test_weak_scaling_has_as_many_microbatches_on_each_gpu(started, tmp_path):
    out = tmp_path / "r.jsonl"
    words = ["--gpus", "2", "--steps", "8", "--out", str(out), "--microbatches", "3", "--layouts", "DP2", "one GPU"]
    assert bench_parallel.main([*words, "PP2"]) == 0
    samples = {(len(d), "--data-parallel" in w): w[w.index("--global-batch") + 1] for _, w, d, _ in started[1:]}
    assert samples == {(1, False): "3", (2, True): "6", (2, False): "3"}
    records = {(r["case"], r["mode"]): r for r in read_records(out)}
    scaling = {key: record["weak_scaling"] for key, record in records.items() if "weak_scaling" in record}
    assert scaling == {
        ("one_GPU", "eager1"): 1.0,
        ("one_GPU", "plugin"): 1.0,
        ("DP2", "eager1"): 5.0 / 8.0,
        ("DP2", "plugin"): 5.0 / 6.25,
    }
    assert {record["microbatches"] for record in records.values()} == {3}


def test_the_page_has_a_line_for_each_layout(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "2", "--steps", "8", "--out", str(out), "--microbatches", "3", "--layouts", "DP2", "one GPU"]
    assert bench_parallel.main(words) == 0
    header, _, *lines = layout_parts(tmp_path)["layouts"].splitlines()
    cells = [dict(zip(header.split(" | "), line.split(" | "), strict=True)) for line in lines if line.startswith("|")]
    assert [each["| layout"] for each in cells] == ["| one_GPU", "| DP2"]
    assert [each["ratio"] for each in cells] == ["**1.00**", "**0.78**"]
    assert [(each["eager scales"], each["graphs scale |"]) for each in cells] == [
        ("1.00", "1.00 |"),
        ("0.62", "0.80 |"),
    ]
    assert cells[1]["graphs peak GiB"] == "1.0/2.0"
    assert (cells[1]["losses"], cells[1]["gradient norms"]) == ("0.00", "0.00")
    assert layout_parts(tmp_path / "none")["layouts"].startswith("Not measured yet: `./run gpu-table`")


def test_timed_runs_have_their_gpus_to_themselves(started, tmp_path):
    words = ["--gpus", "2", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2", "TP2", "PP2", "CP2"]
    assert bench_parallel.main(words) == 0
    times = {(r["case"], r["mode"]): r["ms"] for r in read_records(tmp_path / "r.jsonl")}
    assert {key for key, ms in times.items() if ms is None} == {(c, "eager2") for c in ("DP2", "TP2", "PP2", "CP2")}
    runs = [(mode, dict(itertools.pairwise(words))) for mode, words, *_ in started[1:]]
    assert len({words["--turns"] for _, words in runs}) == 1
    assert Counter((mode, words["--timed-steps"]) for mode, words in runs) == {
        ("eager", "2"): 4,
        ("eager", "0"): 4,
        ("graphs", "2"): 4,
    }
    assert max(beside for *_, beside in started[1:]) < bench_parallel.BESIDE[False]


def test_ranks_that_share_gpus_are_recorded_without_times(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "2", "--small", "--steps", "8", "--out", str(out), "--ranks-per-gpu", "2"]
    assert bench_parallel.main([*words, "--layouts", "TP2xPP2", "DP4", "TP2", "--slots", "PP4"]) == 0
    assert max(beside for *_, beside in started[1:]) < bench_parallel.BESIDE[True]
    told = [(devices, dict(itertools.pairwise(given)), given) for _, given, devices, _ in started[1:]]
    assert [pairs["--timed-steps"] for _, pairs, given in told if "--language-model" not in given] == ["2", "0", "2"]
    shared = [each for each in told if "--language-model" in each[-1]]
    assert len(shared) == 2 * 3 + 2
    for devices, pairs, given in shared:
        assert (devices, pairs["--timed-steps"]) == ((0, 1), "0")
        assert pairs["--language-model"] in ("4x1024", "6x1024")
        assert "vision_cuda_graph_cost_fallback=false" in given
    records = read_records(out)
    assert [record.get("ranks_per_gpu") for record in records[:3]] == [None] * 3
    records = records[3:]
    for record in records:
        check_record(record)
        assert (record["ranks_per_gpu"], record["repeats"], record["ms"]) == (2, 1, None)
        assert not {"ratio", "weak_scaling"} & record.keys()
    assert {record["case"] for record in records} == {
        "TP2xPP2_small_shared",
        "DP4_small_shared",
        "PP4_small_shared_8_microbatches",
        "PP4_small_shared_32_microbatches",
    }
    page = layout_parts(tmp_path)
    assert "| TP2_small | 8 |" in page["layouts"] and "shared" not in page["layouts"]
    assert "| DP4_small_shared | 2 | 8 | 8 | 0.00 | 0.00 | 32/32/32/32 | 0/0/0/0 | 1.0/2.0/3.0/4.0 |" in page["shared"]


def test_a_record_of_shared_gpus_leaves_the_measured_one(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--ranks-per-gpu", "2", "--steps", "8", "--out", str(out), "--layouts", "DP2"]
    assert bench_parallel.main([*words, "--gpus", "2"]) == bench_parallel.main([*words, "--gpus", "1"]) == 0
    assert Counter(record["case"] for record in read_records(out)) == {"DP2": 3, "DP2_shared": 3}
    page = layout_parts(tmp_path)
    assert "| DP2 | 8 |" in page["layouts"] and "shared" not in page["layouts"]


@pytest.mark.parametrize("count", ["0", "5"])
def test_ranks_per_gpu_out_of_range_are_refused(count, capsys):
    with pytest.raises(SystemExit):
        bench_parallel.parse(["--ranks-per-gpu", count])
    assert f"--ranks-per-gpu {count}: allowed is 1 to 4" in capsys.readouterr().err


@pytest.mark.parametrize("grow", [False, True])
def test_graphs_of_many_microbatches_take_what_those_of_few_do(started, tmp_path, grow):
    out = tmp_path / "parallel.jsonl"
    if grow:
        started[0].append("grow")
    words = ["--gpus", "2", "--small", "--out", str(out), "--layouts", "--slots", "PP2"]
    assert bench_parallel.main(words) == int(grow)
    assert all("vision_cuda_graph_buckets=[2304,4608]" in words for _, words, *_ in started[1:])
    records = read_records(out)
    for record in records:
        check_record(record)
    found = [(r["case"], r["microbatches"], r["replays"], r["memory_gb"]) for r in records]
    assert found[0] == ("PP2_small_8_microbatches", 8, 8, 1.03125 if grow else 1.0)
    assert found[1] == ("PP2_small_32_microbatches", 32, 32, 1.125 if grow else 1.0)
    page = layout_parts(tmp_path)
    assert page["layouts"].startswith("Not measured yet") and "| PP2_small_32_microbatches | 32 | 32 |" in page["slots"]


def test_as_many_steps_are_timed_as_are_wanted(started, tmp_path):
    words = [
        "--gpus",
        "2",
        "--steps",
        "30",
        "--timed-steps",
        "4",
        "--out",
        str(tmp_path / "r.jsonl"),
        "--layouts",
        "DP2",
    ]
    assert bench_parallel.main(words) == 0
    repeats = {r["mode"]: r["repeats"] for r in read_records(tmp_path / "r.jsonl")}
    assert repeats == {"eager1": 4, "eager2": 0, "plugin": 4}


def test_untimed_runs_take_no_turns(started, tmp_path):
    words = ["--gpus", "2", "--steps", "8", "--untimed", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2"]
    assert bench_parallel.main(words) == 0
    assert not any("--turns" in words for _, words, *_ in started[1:])
    assert {r["ms"] for r in read_records(tmp_path / "r.jsonl")} == {None}


def test_what_has_no_time_left_leaves_no_record(started, tmp_path, capsys):
    words = ["--gpus", "2", "--seconds", "0", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2", "TP2"]
    assert bench_parallel.main(words) == 1
    assert not started[1:] and read_records(tmp_path / "r.jsonl") == []
    assert "TP2: not measured, the time was used up; give more --seconds" in capsys.readouterr().out


def test_a_run_that_cannot_import_keeps_no_other_waiting(started, tmp_path, monkeypatch):
    original = bench_parallel.TrainingProcess

    class Process(original):
        def wait_until_ready(self):
            if self.log.name == "one_GPU_eager1_8.log":
                raise TrainingFailed("process 0 of 1 ended with status 1: importing the stack", "ImportError: no")

        def __init__(self, log, *place):
            super().__init__(log, *place)
            self.log = log

    monkeypatch.setattr(bench_parallel, "TrainingProcess", Process)
    words = ["--gpus", "2", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--logs", str(tmp_path)]
    assert bench_parallel.main([*words, "--layouts", "DP2", "one GPU"]) == 1
    records = read_records(tmp_path / "r.jsonl")
    assert [r["case"] for r in records if "error" in r] == ["one_GPU"] and len(records) == 4


def test_a_layout_that_fails_is_recorded_and_others_go_on(started, tmp_path):
    started[0].append("TP2")
    out = tmp_path / "parallel.jsonl"
    assert bench_parallel.main(["--gpus", "4", "--out", str(out), "--layouts", "TP2", "DP2"]) == 1
    errors = [r for r in read_records(out) if "error" in r]
    assert [(r["case"], r["error"]) for r in errors] == [
        ("TP2", "process 1 of 2 ended with status 1: no: RuntimeError: out of memory")
    ]
    assert sum(r["case"] == "DP2" for r in read_records(out)) == 3


def test_more_gpus_than_there_are_are_refused(started, tmp_path):
    with pytest.raises(ValueError, match="--layouts DP4: it needs 4 GPUs, allowed here are 2.*--ranks-per-gpu 2"):
        bench_parallel.main(["--gpus", "2", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP4"])


def test_a_machine_without_gpus_is_refused(started, tmp_path):
    with pytest.raises(ValueError, match="--gpus 0: allowed is 1 or more"):
        bench_parallel.main(["--gpus", "0", "--out", str(tmp_path / "r.jsonl")])


def test_torchruns_other_processes_leave_the_work_to_the_first(started, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert bench_parallel.main(["--gpus", "4", "--out", str(tmp_path / "r.jsonl")]) == 0
    assert started[1:] == []
