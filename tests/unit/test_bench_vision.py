"""The vision benchmark without a GPU: its modes on the small tower, and what happens when a process fails."""

import io
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.attention_bounds import scanned_limits
from bridge_cg_plugin.cli.runs.results import check_record, read_records
from bridge_cg_plugin.graphs.errors import CaptureError
from scripts.performance import bench_captures, bench_sizes, bench_vision, profile_vision
from scripts.performance.models import modes, tower
from scripts.performance.models.workloads import coco_microbatches
from scripts.performance.vision import captures, group, sizes, workers
from scripts.performance.vision.task import Task

SMALL = {"small": [(1, 4, 6)], "two": [(1, 4, 4), (2, 6, 4)]}


def task_of(tmp_path, *names, grids=None, seconds=600.0):
    return Task(names, grids or SMALL, str(tmp_path / "r.jsonl"), repeats=3, case_seconds=0.05, seconds=seconds)


def records_of(task):
    found = read_records(Path(task.out))
    for one in found:
        check_record(one)
    return {(r["case"], r["mode"]): r for r in found}


def test_eager_and_the_plugin_beside_each_other(tmp_path):
    modes = ("eager", "plugin", "plugin_te_attention", "plugin_fast", "plugin_streams")
    task = task_of(tmp_path, *modes, grids={"two": SMALL["two"]})
    assert group.measure_group(task) == 0
    found = records_of(task)
    assert set(found) == {("two", mode) for mode in modes}
    for (case, mode), r in found.items():
        eager = found[case, "eager"]
        assert r["ratio"] == pytest.approx(r["ms"] / eager["ms"]) and r["gpu"] == "none"
        assert (r["tokens"], r["images"]) == (64, 2)
        assert 0 < r["fwd_ms"] < r["ms"] and r["host_ms"] > 0
        if mode != "eager":
            assert r["bucket"] == r["tokens"] and r["memory_gb"] > 0
            assert r["forward_rel"] <= 1e-6 and r["grad_rel"] <= 1e-5


@pytest.fixture
def traced_only(monkeypatch):
    """Let `torch.compile` trace but generate no code, which takes minutes."""
    tower.start_process()  # imports Megatron, which has its own functions compiled
    compile_ = torch.compile
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch, "compile", lambda model, mode: compile_(model, backend="eager"))
    yield
    torch._dynamo.reset()


def test_a_compiled_tower_computes_what_eager_computes(tmp_path, traced_only):
    task = task_of(tmp_path, "compile", grids={"small": SMALL["small"]})
    assert group.measure_group(task) == 0
    found = records_of(task)["small", "compile"]
    assert found["graph_breaks"] > 0 and found["compile_s"] > 0
    assert found["forward_rel"] <= 1e-5 and found["grad_rel"] <= 1e-4


def test_a_compiled_tower_gets_the_mode_that_was_asked_for(monkeypatch):
    asked = []
    tower.start_process()
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    model = tower.build_tower()
    batch = tower.make_batch(SMALL["small"], model)
    for name in ("compile", "compile_reduce_overhead"):
        with modes.MODES[name]().on(model, None, batch):
            pass
    assert asked == ["default", "reduce-overhead"]


@pytest.fixture
def without_plugin():
    bridge_cg_plugin.deactivate()
    yield
    bridge_cg_plugin.activate()


def test_upstreams_graphs_need_a_gpu_and_the_record_says_what_they_are(tmp_path, without_plugin):
    task = task_of(tmp_path, "upstream")
    assert group.measure_group(task) == 0
    for r in records_of(task).values():
        assert "transformer_engine not enabled" in r["error"] and "ms" not in r
        assert "another function" in r["wrong"]


def test_upstreams_mode_refuses_a_process_with_the_plugin(tmp_path):
    bridge_cg_plugin.activate()
    task = task_of(tmp_path, "upstream", grids={"small": SMALL["small"]})
    group.measure_group(task)
    assert "BRIDGE_CG_PLUGIN=0" in records_of(task)["small", "upstream"]["error"]


def test_upstreams_fields_are_set_for_the_duration_only():
    tower.start_process()
    model = tower.build_tower()
    with modes._configured(model, "transformer_engine", 64):
        configs = [m.config for m in model.modules() if hasattr(m, "config")]
        assert all(
            (c.cuda_graph_impl, c.max_vision_cuda_graph_seq_length) == ("transformer_engine", 64) for c in configs
        )
    assert all(c.cuda_graph_impl == "none" for c in configs)


class Failing:
    """A mode that fails with an error."""

    def __init__(self, error):
        self.name, self.error = "plugin", error

    @contextmanager
    def on(self, model, grads, batch):
        raise self.error
        yield


def test_a_mode_that_fails_leaves_a_record_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(group.MODES, "plugin", lambda: Failing(ValueError("too long\nmore")))
    task = task_of(tmp_path, "plugin", "plugin_fast", grids={"small": SMALL["small"]})
    assert group.measure_group(task) == 0
    found = records_of(task)
    assert found["small", "plugin"]["error"] == "ValueError: too long"
    assert "ms" in found["small", "plugin_fast"]


def test_a_lack_of_memory_is_said_first_whatever_wraps_it():
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried")
    wrapped = CaptureError("in bucket 64")
    wrapped.__cause__ = lack
    for error in (lack, wrapped):
        assert group.explained(error) == "out of memory: OutOfMemoryError: CUDA out of memory. Tried"


def test_a_gpu_of_no_use_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setitem(group.MODES, "plugin", lambda: Failing(RuntimeError("illegal memory access")))
    monkeypatch.setattr(group, "gpu_is_usable", lambda: False)
    task = task_of(tmp_path, "eager", "plugin", "plugin_fast")
    assert group.measure_group(task) == group.POISONED
    assert set(records_of(task)) == {("small", "eager"), ("small", "plugin")}


def test_a_plugin_that_did_not_replay_has_no_time(tmp_path, monkeypatch):
    from bridge_cg_plugin.graphs.fallback import Fallback
    from bridge_cg_plugin.graphs.region import Region

    monkeypatch.setattr(Region, "_place", lambda self, *where, **options: Fallback.NO_FREE_SLOT)
    task = task_of(tmp_path, "plugin", grids={"small": SMALL["small"]})
    group.measure_group(task)
    assert "did not replay" in records_of(task)["small", "plugin"]["error"]


def test_no_time_left_is_said_in_every_record(tmp_path):
    task = task_of(tmp_path, "eager", "plugin", seconds=0.0)
    time.sleep(0.01)
    assert group.measure_group(task) == 0
    assert {r["error"] for r in records_of(task).values()} == {
        "TimeoutError: not measured, the 0 s of this process were used up"
    }


def test_hooks_that_were_released_accumulate_again_after_attaching():
    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batch = tower.make_batch(SMALL["small"], model)
    tower.step(model, batch)
    expected = grads.copy()
    grads.zero()
    grads.release()
    tower.step(model, batch)
    assert all(not g.any() for g in grads.copy()) and any(p.grad is not None for p in model.parameters())
    model.zero_grad()
    grads.attach()
    tower.step(model, batch)
    assert tower.largest_relative(grads.copy(), expected) <= 1e-6


# Processes


WORKER = """
import json, os, sys, time
print("ready", flush=True)
line = sys.stdin.readline()
if not line:
    sys.exit(0)
task = json.loads(line)
origin = {{"repeats": 1, "seed": 0, "date": "d", "gpu": "g", "versions": {{}}, "command": "c"}}
for name in task["grids"]:
    for mode in task["modes"]:
        {body}
        with open(task["out"], "a") as file:
            record = {{"case": name, "mode": mode, "tokens": 16, "images": 1, "ms": 1.0, **origin}}
            file.write(json.dumps(record) + chr(10))
"""


@pytest.fixture
def set_workers(monkeypatch):
    """Return a function that sets what a worker does before each record; the started workers are listed."""
    started = []

    def use(body):
        def start(group):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", WORKER.format(body=body)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            return started[-1]

        monkeypatch.setattr(workers, "start_worker", start)
        return started

    return use


CASES = {"a": [(1, 4, 4)], "b": [(1, 4, 6)], "c": [(1, 4, 8)]}


def test_groups_measure_in_turn_and_all_workers_end(set_workers, tmp_path):
    started = set_workers("pass")
    task = task_of(tmp_path, grids=CASES)
    workers.run_groups([("eager", "plugin"), ("compile",)], task)
    found = records_of(task)
    assert set(found) == {(case, mode) for case in CASES for mode in ("eager", "plugin", "compile")}
    assert all("error" not in r for r in found.values())
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_case_that_kills_its_process_is_noted_and_the_others_are_measured(set_workers, tmp_path):
    started = set_workers("if name == 'b' and mode == 'plugin': os._exit(9)")
    task = task_of(tmp_path, grids=CASES)
    workers.run_groups([("eager", "plugin")], task)
    found = records_of(task)
    assert found["b", "plugin"]["error"] == "the process ended with status 9"
    assert {key for key, r in found.items() if "error" in r} == {("b", "plugin")}
    assert len(started) == 2


def test_a_process_that_dies_of_every_case_is_not_started_for_ever(set_workers, tmp_path):
    started = set_workers("os._exit(9)")
    task = task_of(tmp_path, grids={**CASES, "d": [(1, 4, 4)], "e": [(1, 4, 4)]})
    workers.run_groups([("eager",)], task)
    errors = [r["error"] for r in records_of(task).values()]
    assert len(started) == 1 + workers.RESTARTS
    assert errors == ["the process ended with status 9"] * 3 + ["not tried: the process ended with status 9"] * 2


def test_a_process_that_hangs_is_stopped(set_workers, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE", 0.5)
    started = set_workers("time.sleep(600) if name == 'b' else None")
    task = task_of(tmp_path, grids=CASES, seconds=6.0)
    workers.run_groups([("eager",)], task)
    found = records_of(task)
    assert "error" not in found["a", "eager"]
    assert found["b", "eager"]["error"].startswith("stopped after")
    assert found["c", "eager"]["error"].startswith("not tried: stopped after")
    assert started[0].poll() is not None and len(started) == 1


def test_modes_that_no_time_is_left_for_say_so_and_are_not_tried(set_workers, tmp_path):
    started = set_workers("pass")
    task = task_of(tmp_path, "compile", grids=CASES, seconds=0.0)
    workers.run_groups([("compile",)], task)
    assert {r["error"].partition(":")[0] for r in records_of(task).values()} == {"not measured"}
    assert len(records_of(task)) == len(CASES) and all(process.poll() is not None for process in started)


def test_later_groups_share_what_the_first_leaves(monkeypatch, set_workers, tmp_path):
    set_workers("pass")
    given = {}
    monkeypatch.setattr(workers, "run_group", lambda process, task: given.update({task.modes: task.seconds}))
    workers.run_groups([("eager",), ("upstream",), ("compile",)], task_of(tmp_path, grids=CASES, seconds=100.0))
    assert given["eager",] > 80 and given["upstream",] == pytest.approx(given["eager",] / 2, rel=0.05)
    assert given["compile",] == pytest.approx(given["eager",], rel=0.05)


def test_a_run_replaces_its_records_and_leaves_others(set_workers, tmp_path):
    set_workers("pass")
    out = tmp_path / "r.jsonl"
    kept = {"case": "1x2048", "mode": "eager", "ms": 5.0, "repeats": 1, "seed": 0, "date": "d", "gpu": "g"}
    kept |= {"tokens": 16384, "images": 1, "versions": {}, "command": "c"}
    out.write_text(json.dumps(kept) + "\n" + json.dumps({**kept, "case": "1x448"}) + "\n")
    line = ["--out", str(out), "--modes", "eager,limit", "--cases", "1x448", "--tokens", "512"]
    assert bench_vision.main(line) == 0
    found = {(r["case"], r["mode"]): r["ms"] for r in read_records(out)}
    assert found["1x2048", "eager"] == 5.0 and found["1x448", "eager"] == 1.0
    assert found["tokens_512", "limit"] == pytest.approx(2.2, rel=0.1)


@pytest.mark.parametrize(
    "line, said",
    [
        (["--modes", "eager,fast"], "--modes fast: it must"),
        (["--cases", "x"], "--cases x: it must"),
        (["--tokens", "many"], "--tokens many: it must"),
        (["--cases", "", "--tokens", ""], "Cannot measure anything: --cases"),
        ([], "without a GPU. Pass --out FILE"),
    ],
)
def test_refused_command_lines(line, said, capsys, set_workers):
    started = set_workers("pass")
    assert bench_vision.main(line) == 2
    assert said in capsys.readouterr().err and not started


def test_a_worker_measures_what_it_is_given(tmp_path, monkeypatch, capsys):
    """In this process: importing takes long; the GPU tests start one."""
    task = task_of(tmp_path, "eager", "plugin", grids={"small": SMALL["small"]})
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a worker lets modules print elsewhere
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(task)) + "\n"))
    assert bench_vision.main(["--worker"]) == 0
    found = records_of(task)
    assert found["small", "plugin"]["bit_equal"] in (True, False) and "error" not in found["small", "eager"]
    assert capsys.readouterr().out.startswith("ready")


# The scripts beside it


def test_a_profile_is_printed_and_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile_vision, "workloads", lambda cases, tokens: SMALL)
    out = tmp_path / "p.jsonl"
    assert profile_vision.main(["--modes", "eager,plugin", "--records", "--out", str(out)]) == 0
    found = read_records(out)
    for one in found:
        check_record(one)
    assert [(r["case"], r["mode"]) for r in found] == [(c, m) for c in SMALL for m in ("eager", "plugin")]
    assert "two plugin:" in capsys.readouterr().out
    assert profile_vision.main(["--modes", "upstream"]) == 2


def test_images_of_real_sizes_eager_and_on_graphs(monkeypatch, capsys, tmp_path):
    grids = [[(1, 2 + 2 * (i % 3), 4)] * (1 + i % 2) for i in range(12)]
    found = {r["mode"]: r for r in sizes.measure(grids, 6, "exact", 1, sizes.MODES)}
    for one in found.values():
        check_record(one)
    plugin = found["plugin"]
    assert found["each_size"]["eager_share"] == found["each_size"]["padding_share"] == 0
    assert found["on_demand"]["replays"] == 12 and found["on_demand"]["longest_capture_s"] > 0
    assert plugin["replays"] + sum(plugin["fallbacks"].values()) == plugin["microbatches"] == 12
    assert plugin["replays"] > 0 and 0 <= plugin["padding_share"] < 1
    assert plugin["grad_rel"] <= 1e-4
    assert plugin["ratio"] == pytest.approx(plugin["ms"] / found["eager"]["ms"])
    assert found["limit"]["ms"] > 0


def test_one_bucket_for_each_size_of_photographs_takes_few_recordings():
    grids = coco_microbatches(200, 4, 1)
    options = sizes.options_of("each_size", "exact", grids)
    assert options["max_frames"] == 4 and len(options["buckets"]) > 150
    recordings = sum(len(scanned_limits(tokens, options["max_frames"])) for tokens in options["buckets"])
    assert recordings <= 2 * len(options["buckets"])


def test_recordings_of_two_models_in_two_processes(monkeypatch, tmp_path):
    made = captures.captures(24, 64)

    def in_this_process(child, env, **others):
        assert Path(env["TRITON_CACHE_DIR"]).parent == Path(child[3]).parent and child[4:] == ["24", "64"]
        Path(child[3]).write_text(json.dumps(made))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(captures, "subprocess", SimpleNamespace(run=in_this_process))
    out = tmp_path / "captures.jsonl"
    assert bench_captures.main(["--out", str(out), "--small", "24", "--large", "64"]) == 0
    found = read_records(out)
    cases = ["first_24", "later_64", "next_model_64", "later_24"]
    assert [(r["mode"], r["case"]) for r in found] == [(mode, case) for mode in ("cold", "warm") for case in cases]
    assert [r["repeats"] for r in found] == 2 * [1, captures.REPEATS, captures.REPEATS, captures.REPEATS]
    assert all(r["replays"] == r["repeats"] and r["grad_rel"] <= 1e-4 and r["ms"] > 0 for r in found)


def test_buckets_are_planned_from_at_least_one_microbatch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_sizes.py", "--out", "x", "--warmup", "0"])
    assert bench_sizes.main() == 2
    assert "--warmup 0: it must be 1 to" in capsys.readouterr().err
