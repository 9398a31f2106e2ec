"""bench_parallel.py without a GPU: what runs where, and what is recorded."""

import functools
import itertools
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_parallel
from scripts.performance.layouts import bench as layouts_bench
from scripts.performance.layouts import jobs as layout_runs
from scripts.performance.layouts import times as layout_times
from scripts.performance.measuring import machine
from scripts.performance.pages.layouts_page import layout_parts
from scripts.performance.processes import TrainingFailed, TrainingProcess

from .idle_trainings import idle_trainings

ALL = list(layout_runs.LAYOUTS.values())


@given(
    st.lists(st.sampled_from(ALL), max_size=6),
    st.lists(st.sampled_from(ALL), max_size=2),
    st.integers(1, 6),
    st.integers(2, 4),
)
def test_runs_of_a_wave_have_gpus_of_their_own(layouts, slots, gpus, eager_runs):
    waves = layout_runs.waves(layouts, slots, 2, 50, eager_runs, gpus)
    jobs = [job for wave in waves for job in wave]
    assert len(jobs) == len(set(jobs)) == len({*layouts}) * (eager_runs + 1) + 2 * len({*slots})
    for wave in waves:
        taken = [device for job in wave for device in job.devices]
        assert wave and len(set(taken)) == len(taken) and set(taken) <= set(range(gpus))
        assert all(len(job.devices) == min(job.layout.ranks, gpus) for job in wave)
    for wave, after in itertools.pairwise(waves):
        assert sum(len(job.devices) for job in (*wave, after[0])) > gpus, "the next run would have had room"


def test_runs_that_are_timed_go_together():
    waves = layout_runs.waves([layout_runs.LAYOUTS[name] for name in ("TP2", "DP4", "one GPU")], [], 2, 50, 3, 4)
    assert [[(job.mode, job.devices) for job in wave] for wave in waves[:3]] == [
        [("eager1", (0,)), ("plugin", (1,)), ("eager2", (2,)), ("eager3", (3,))],
        [("eager1", (0, 1)), ("plugin", (2, 3))],
        [("eager2", (0, 1)), ("eager3", (2, 3))],
    ]
    assert [[str(job) for job in wave] for wave in waves[3:]] == [
        ["DP4 eager1"],
        ["DP4 plugin"],
        ["DP4 eager2"],
        ["DP4 eager3"],
    ]


def test_a_dry_run_says_what_runs_when(started, tmp_path, capsys):
    words = ["--small", "--microbatches", "2", "--gpus", "4", "--dry-run", "--seconds", "100"]
    assert bench_parallel.main([*words, "--layouts", "one GPU", "DP2"]) == 0
    assert not started[1:]
    first, second, third, late = capsys.readouterr().out.splitlines()
    assert first.strip() == (
        "25 to   60 s: one GPU eager1 on GPU 0, one GPU plugin on GPU 1, one GPU eager2 on GPU 2, "
        "one GPU eager3 on GPU 3; recorded: one GPU"
    )
    assert "DP2 plugin on GPUs 2 to 3" in second and "recorded" not in second
    assert third.split()[:4] == ["96", "to", "131", "s:"] and third.endswith("recorded: DP2")
    assert late.startswith("not through after 100 s: DP2;")


def test_a_wave_waits_for_its_imports():
    short = layout_runs.waves([layout_runs.LAYOUTS["DP4"]], [], 1, 1, 4, 4)
    times = layout_times.expected_times(short)
    begins = [begin for begin, _ in times]
    assert begins[:2] == [25.0, times[0][1]]
    assert begins[4] == begins[2] + 25.0 > times[3][1], "it imports since the third began"


@pytest.fixture
def started(monkeypatch):
    return idle_trainings(monkeypatch)


@pytest.fixture
def real_processes(monkeypatch):
    """Processes that are real, with a stand-in for the training."""
    stand_in = functools.partial(TrainingProcess, module="tests.unit.stand_in_training")
    monkeypatch.setattr(layouts_bench, "TrainingProcess", stand_in)


def test_real_processes_go_in_waves(real_processes, tmp_path, capfd):
    out = tmp_path / "r.jsonl"
    words = ["--gpus", "4", "--steps", "8", "--out", str(out), "--logs", str(tmp_path), "--layouts", "one GPU", "DP2"]
    assert bench_parallel.main(words) == 0
    assert Counter(record["case"] for record in read_records(out)) == {"one_GPU": 4, "DP2": 4}
    said = capfd.readouterr().out
    assert said.count("verdict: SAME") == 2 and ("still imported beside" in said or "runs had imported" in said)


def test_real_processes_end_in_time(real_processes, tmp_path, capfd):
    out, began = tmp_path / "r.jsonl", time.monotonic()
    words = ["--gpus", "4", "--steps", "8", "--out", str(out), "--logs", str(tmp_path), "--layouts", "PP2"]
    assert bench_parallel.main([*words, "--seconds", "4"]) == 1
    assert 4 <= time.monotonic() - began < 25 and read_records(out) == []
    assert "used up: PP2 eager1, PP2 plugin, PP2 eager2, PP2 eager3" in capfd.readouterr().out


def test_every_layout_gives_a_record_of_each_run(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "4", "--steps", "8", "--out", str(out), "--small", "--layouts", "TP2", "DP2", "TP2xPP2"]
    assert bench_parallel.main(words) == 0
    records = read_records(out)
    for record in records:
        check_record(record)
    found = {(r["case"], r["mode"]) for r in records}
    assert found == {
        (f"{c}_small", m) for c in ("TP2", "DP2", "TP2xPP2") for m in ("eager1", "eager2", "eager3", "plugin")
    }
    plugin = next(r for r in records if (r["case"], r["mode"]) == ("TP2_small", "plugin"))
    assert (plugin["ratio"], plugin["inside_spread"], len(plugin["rank_peak_gb"])) == (6.25 / 8.0, True, 2)
    assert all("--loader-workers" in w for _, w, *_ in started[1:])


def test_replicas_encode_images_of_other_ranks_if_asked(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "2", "--steps", "8", "--out", str(out), "--balance", "--layouts", "one GPU", "TP2", "DP2"]
    assert bench_parallel.main(words) == 0
    found = {(r["case"], r["mode"]): r for r in read_records(out)}
    for record in found.values():
        check_record(record)
    moved = {case for case, mode in found if mode == "plugin_balanced"}
    assert moved == {"DP2"} and sum("vision_cuda_graph_balance=0.1" in w for _, w, *_ in started[1:]) == 1
    imbalance = [found["DP2", mode]["token_imbalance"] for mode in ("plugin", "plugin_balanced")]
    assert imbalance == [pytest.approx(4 / 3), 1.0] and found["DP2", "plugin_balanced"]["inside_spread"]
    assert found["DP2", "plugin_balanced"]["ms"] == 6.25 and "token_imbalance" not in found["one_GPU", "plugin"]
    line = next(line for line in layout_parts(tmp_path)["balanced"].splitlines() if line.startswith("| DP2 "))
    assert line == "| DP2 | 6 | 6 | **1.00** | 1.33 | 1.00 |"


def test_weak_scaling_has_as_many_microbatches_on_each_gpu(started, tmp_path):
    out = tmp_path / "r.jsonl"
    words = ["--gpus", "2", "--steps", "8", "--out", str(out), "--microbatches", "3", "--layouts", "DP2", "one GPU"]
    assert bench_parallel.main([*words, "PP2"]) == 0
    samples = {(len(d), "--data-parallel" in w): w[w.index("--global-batch") + 1] for _, w, d, _ in started[1:]}
    assert samples == {(1, False): "3", (2, True): "6", (2, False): "3"}
    records = {(r["case"], r["mode"]): r for r in read_records(out)}
    assert {record["microbatches"] for record in records.values()} == {3}


def test_the_last_steps_of_two_runs_are_timed(started, tmp_path):
    words = ["--gpus", "2", "--steps", "30", "--timed-steps", "2", "--out", str(tmp_path / "r.jsonl")]
    assert bench_parallel.main([*words, "--layouts", "DP2", "TP2"]) == 0
    found = {(r["case"], r["mode"]): (r["ms"], r["repeats"]) for r in read_records(tmp_path / "r.jsonl")}
    untimed = {(case, mode): (None, 0) for case in ("DP2", "TP2") for mode in ("eager2", "eager3")}
    timed = {(case, mode): (ms, 2) for case in ("DP2", "TP2") for mode, ms in (("eager1", 8.0), ("plugin", 6.25))}
    assert found == {**timed, **untimed}


def test_a_wave_imports_while_the_one_before_the_last_trains(started, tmp_path, monkeypatch):
    happened = []

    class Process(layouts_bench.TrainingProcess):
        def __init__(self, log, ranks, devices):
            super().__init__(log, ranks, devices)
            happened.append(("imports", log.stem))
            self.log = log

        def train(self, *words):
            happened.append(("trains", self.log.stem))
            return super().train(*words)

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    words = ["--gpus", "4", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--logs", str(tmp_path)]
    assert bench_parallel.main([*words, "--layouts", "DP4"]) == 0
    runs = [f"DP4_{mode}_8" for mode in ("eager1", "plugin", "eager2", "eager3")]
    assert happened == [
        *(("imports", run) for run in runs[:2]),
        *(("imports", runs[2]), ("trains", runs[0])),
        *(("imports", runs[3]), ("trains", runs[1])),
        *(("trains", run) for run in runs[2:]),
    ]


@pytest.mark.parametrize("cores, gpus, importing, each", [(64, 4, 16, 12), (32, 2, 8, 12), (17, 4, 17, 17)])
def test_cores_are_divided(cores, gpus, importing, each):
    found = machine.divide(range(cores), gpus)
    assert (len(found.importing), [len(own) for own in found.training]) == (importing, [each] * gpus)
    if importing < cores:
        every = [*found.importing, *itertools.chain(*found.training)]
        assert sorted(every) == list(range(cores))
    assert found.of_ranks(4, (0, 1)) == [found.training[rank % 2] for rank in range(4)]


def test_a_run_has_the_cores_of_its_gpus(started, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    words = ["--gpus", "4", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--layouts", "TP2", "one GPU"]
    assert bench_parallel.main(words) == 0
    for _, _, devices, cores in started[1:]:
        assert [set(own) for own in cores] == [set(range(12 * device, 12 * device + 12)) for device in devices]


def test_a_system_that_keeps_nothing_to_cores_is_said(capsys):
    class Process:
        def keep_to(self, cores):
            raise PermissionError("not permitted")

    machine.keep_to(Process(), [(0,)])
    assert "runs have no cores of their own: not permitted" in capsys.readouterr().out


def test_ranks_that_share_gpus_are_recorded_without_times(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "2", "--small", "--steps", "8", "--out", str(out), "--ranks-per-gpu", "2"]
    assert bench_parallel.main([*words, "--layouts", "TP2xPP2", "DP4", "TP2", "--slots", "PP4"]) == 0
    told = [(devices, dict(itertools.pairwise(given)), given) for _, given, devices, _ in started[1:]]
    shared = [each for each in told if "--language-model" in each[-1]]
    assert len(shared) == 2 * 4 + 2
    for devices, pairs, _ in shared:
        assert devices == (0, 1) and pairs["--language-model"] in ("4x1024", "6x1024")
    records = read_records(out)
    assert [record.get("ranks_per_gpu") for record in records[:4]] == [None] * 4
    records = records[4:]
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
    assert (
        "| DP4_small_shared | 2 | 8 | 8 | 0.00 (0.00) | 0.00 (0.00) | 32/32/32/32 | 0/0/0/0 | 1.0/2.0/3.0/4.0 |"
        in page["shared"]
    )


def test_a_record_of_shared_gpus_leaves_the_measured_one(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--ranks-per-gpu", "2", "--steps", "8", "--out", str(out), "--layouts", "DP2"]
    assert bench_parallel.main([*words, "--gpus", "2"]) == bench_parallel.main([*words, "--gpus", "1"]) == 0
    assert Counter(record["case"] for record in read_records(out)) == {"DP2": 4, "DP2_shared": 4}
    page = layout_parts(tmp_path)
    assert "| DP2 | 8 |" in page["layouts"] and "shared" not in page["layouts"]


@pytest.mark.parametrize("count", ["0", "5"])
def test_ranks_per_gpu_out_of_range_are_refused(count, capsys):
    with pytest.raises(SystemExit):
        bench_parallel.parse(["--ranks-per-gpu", count])
    assert f"--ranks-per-gpu {count}: it must be 1 to 4" in capsys.readouterr().err


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


def test_graphs_replay_whatever_times_say(started, tmp_path):
    words = ["--gpus", "2", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2", "--slots", "PP2"]
    assert bench_parallel.main(words) == 0
    said = [(mode, "vision_cuda_graph_tuning.cost_fallback=false" in words) for mode, words, *_ in started[1:]]
    assert Counter(said) == {("eager", False): 3, ("graphs", True): 3}


def test_as_many_eager_runs_as_are_wanted_replace_earlier_ones(started, tmp_path):
    words = ["--gpus", "2", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2", "--eager-runs"]
    for runs in (4, 2):
        assert bench_parallel.main([*words, str(runs)]) == 0
        modes = [record["mode"] for record in read_records(tmp_path / "r.jsonl")]
        assert modes == [*(f"eager{number + 1}" for number in range(runs)), "plugin"]


@pytest.mark.parametrize(
    "option, value, least", [("--eager-runs", "1", 2), ("--timed-steps", "-1", 0), ("--steps", "0", 1)]
)
def test_too_few_are_refused(option, value, least, capsys):
    with pytest.raises(SystemExit):
        bench_parallel.parse([option, value])
    assert f"{option} {value}: it must be {least} or more" in capsys.readouterr().err


def test_what_has_no_time_left_leaves_no_record(started, tmp_path, capsys):
    words = ["--gpus", "2", "--seconds", "0", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2", "TP2"]
    assert bench_parallel.main(words) == 1
    assert not started[1:] and read_records(tmp_path / "r.jsonl") == []
    said = capsys.readouterr().out
    assert "not through when the time was used up: TP2 eager1, TP2 plugin, TP2 eager2, TP2 eager3; give more" in said


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where a test says so."""
    made = SimpleNamespace(now=0.0, monotonic=lambda: made.now)
    monkeypatch.setattr(layouts_bench, "time", made)
    return made


def test_runs_that_are_not_through_in_time_are_named_and_others_recorded(started, clock, tmp_path, monkeypatch, capsys):
    class Process(layouts_bench.TrainingProcess):
        def train(self, mode, words, limit_s):
            if "--tensor-parallel" in words and mode == "graphs":
                clock.now += limit_s
                raise TrainingFailed("process 0 of 2 ended with status -9: training")
            return super().train(mode, words, limit_s)

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    words = ["--gpus", "4", "--steps", "8", "--seconds", "600", "--out", str(tmp_path / "r.jsonl")]
    assert bench_parallel.main([*words, "--layouts", "DP2", "TP2"]) == 1
    assert {record["case"] for record in read_records(tmp_path / "r.jsonl")} == {"DP2"}
    assert "time was used up: TP2 plugin, TP2 eager2, TP2 eager3; give" in capsys.readouterr().out


@pytest.mark.parametrize("ended", [("eager1", "plugin", "eager2"), ("eager1", "plugin"), ("eager1", "eager2")])
def test_a_layout_is_recorded_by_the_runs_that_ended_if_they_have_a_spread(
    started, clock, tmp_path, monkeypatch, capsys, ended
):
    class Process(layouts_bench.TrainingProcess):
        def __init__(self, log, *place):
            super().__init__(log, *place)
            self.mode = log.name.split("_")[1]

        def train(self, mode, words, limit_s):
            if self.mode in ended:
                return super().train(mode, words, limit_s)
            clock.now += limit_s
            raise TrainingFailed("process 0 of 2 ended with status -9: training")

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    words = ["--gpus", "8", "--steps", "8", "--seconds", "600", "--out", str(tmp_path / "r.jsonl")]
    words += ["--layouts", "DP2", "--logs", str(tmp_path), "--eager-runs", "3"]
    complete = len(ended) == 3
    assert bench_parallel.main(words) == int(not complete)
    assert {record["mode"] for record in read_records(tmp_path / "r.jsonl")} == (set(ended) if complete else set())
    assert "time was used up: " in capsys.readouterr().out


def test_processes_that_import_beyond_the_time_are_ended(started, tmp_path, monkeypatch):
    ended = threading.Event()

    class Process(layouts_bench.TrainingProcess):
        def wait_until_ready(self):
            assert ended.wait(20)
            raise TrainingFailed("process 0 of 2 ended with status -9: importing the stack")

        def close(self):
            ended.set()

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    began = time.monotonic()
    words = ["--gpus", "2", "--seconds", "0.2", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP2"]
    assert bench_parallel.main(words) == 1
    assert time.monotonic() - began < 10 and not started[1:]


def test_a_run_that_cannot_import_keeps_no_other_waiting(started, tmp_path, monkeypatch):
    original = layouts_bench.TrainingProcess

    class Process(original):
        def wait_until_ready(self):
            if self.log.name == "one_GPU_eager1_8.log":
                raise TrainingFailed("process 0 of 1 ended with status 1: importing the stack", "ImportError: no")

        def __init__(self, log, *place):
            super().__init__(log, *place)
            self.log = log

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    words = ["--gpus", "2", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--logs", str(tmp_path)]
    assert bench_parallel.main([*words, "--layouts", "DP2", "one GPU"]) == 1
    records = read_records(tmp_path / "r.jsonl")
    assert [r["case"] for r in records if "error" in r] == ["one_GPU"] and len(records) == 5


def test_a_layout_that_fails_is_recorded_and_others_go_on(started, tmp_path):
    started[0].append("TP2")
    out = tmp_path / "parallel.jsonl"
    assert bench_parallel.main(["--gpus", "4", "--out", str(out), "--layouts", "TP2", "DP2"]) == 1
    errors = [r for r in read_records(out) if "error" in r]
    assert [(r["case"], r["error"]) for r in errors] == [
        ("TP2", "process 1 of 2 ended with status 1: no: RuntimeError: out of memory")
    ]
    assert sum(r["case"] == "DP2" for r in read_records(out)) == 4
    assert sum("--tensor-parallel" in words for _, words, *_ in started[1:]) == 2, "its other runs are not trained"


def test_more_gpus_than_there_are_are_refused(started, tmp_path):
    with pytest.raises(ValueError, match="--layouts DP4: it needs 4 GPUs, and there are 2.*--ranks-per-gpu 2"):
        bench_parallel.main(["--gpus", "2", "--out", str(tmp_path / "r.jsonl"), "--layouts", "DP4"])


def test_a_machine_without_gpus_is_refused(started, tmp_path):
    with pytest.raises(ValueError, match="--gpus 0: it must be 1 or more"):
        bench_parallel.main(["--gpus", "0", "--out", str(tmp_path / "r.jsonl")])


def test_torchruns_other_processes_leave_the_work_to_the_first(started, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert bench_parallel.main(["--gpus", "4", "--out", str(tmp_path / "r.jsonl")]) == 0
    assert started[1:] == []
