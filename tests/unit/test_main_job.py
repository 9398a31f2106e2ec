import json
import sys
from types import SimpleNamespace

import pytest

from examples.photographs import gpu
from scripts.performance.photographs import arguments as command
from scripts.performance.photographs import comparison, training
from scripts.performance.runs.processes import TrainingFailed


def run_of(losses, replays=4):
    graphs = {"replays": replays} if replays is not None else None
    steps = len(losses)
    return {
        "losses": losses,
        "grad_norms": [1.0] * steps,
        "step_ms": [100.0] * steps,
        "peak_gb": 1.0,
        "graphs": graphs,
    }


EAGER = [2.0] * 8, [2.1] * 8


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what the three processes of the main job give."""

    def give(graphs, replays=4, again=None):
        eager = iter([run_of(EAGER[0], None), run_of(EAGER[1], None)])
        modes = []

        class Process:
            def __init__(self, ranks):
                modes.append(f"{ranks} GPU")

            def wait_until_ready(self):
                modes.append("ready")

            def train(self, mode, arguments):
                modes.append(mode)
                if mode == "eager":
                    return next(eager)
                return again if again is not None and arguments else run_of(graphs, replays)

            def close(self):
                modes.append("closed")

        monkeypatch.setattr(gpu, "TrainingProcess", Process)
        monkeypatch.setattr(gpu, "at_once", lambda: 2)
        return modes

    return give


def test_graphs_inside_the_spread_end_with_zero(runs, capsys):
    modes = runs([2.05] * 8)
    assert gpu.main(8, 2, []) == 0
    assert modes == ["1 GPU"] * 3 + ["ready"] * 3 + ["eager", "graphs", "eager"] + ["closed"] * 3
    assert "verdict: SAME" in capsys.readouterr().out


@pytest.mark.parametrize("graphs, replays", [([2.05] * 7 + [2.5], 4), ([2.05] * 8, 0), ([float("nan")] * 8, 4)])
def test_other_losses_or_no_replay_end_with_one(runs, graphs, replays, capsys):
    runs(graphs, replays)
    assert gpu.main(8, 2, []) == 1
    said = capsys.readouterr().out
    assert "verdict: DIFFERENT" in said
    assert ("2 eager runs say little" in said) == (replays > 0)


@pytest.mark.parametrize("further, verdicts", [([2.4, 4.0], ["DIFFERENT", "SAME"]), ([2.0] * 4, ["DIFFERENT"] * 3)])
def test_eager_runs_that_are_outside_themselves_are_joined_by_more(runs, monkeypatch, capsys, further, verdicts):
    modes = runs([])
    order = [2.0, None, 2.1, 2.9, *further]
    results = iter([run_of([4.4] * 8) if loss is None else run_of([loss] * 8, None) for loss in order])
    monkeypatch.setattr(gpu.TrainingProcess, "train", lambda self, mode, arguments: next(results))
    assert gpu.main(8, 3, []) == (verdicts[-1] != "SAME")
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines() if line.startswith("verdict")] == verdicts
    assert modes.count("closed") == len(order)


def test_side_by_side_only_the_first_eager_run_is_timed(runs, tmp_path):
    modes = runs([2.05] * 8)
    path = tmp_path / "pretrain.jsonl"
    assert gpu.main(8, 2, [], path, side_by_side=True) == 0
    assert modes[6:-3] == ["eager", "graphs", "eager"]
    assert [json.loads(line)["ms"] for line in path.read_text().splitlines()] == [100.0, None, 100.0]


@pytest.mark.parametrize("gib, runs_at_once", [(80, 2), (139, 3), (180, 4)])
def test_as_many_runs_share_a_gpu_as_its_memory_takes(monkeypatch, gib, runs_at_once):
    found = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_properties", lambda _: found)
    assert gpu.at_once() == runs_at_once


def test_further_graphed_runs_share_the_eager_ones(runs, tmp_path):
    modes = runs([2.05] * 8, again=run_of([2.5] * 8))
    path = tmp_path / "pretrain.jsonl"
    assert gpu.main(8, 2, [], path, also=[["model.cuda_graph_impl=transformer_engine"]]) == 1
    assert modes[8:-4] == ["eager", "graphs", "graphs", "eager"]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    verdicts = {r["case"]: r["inside_spread"] for r in records if r["mode"] == "plugin"}
    assert verdicts == {"mixed": True, "mixed_language_model": False}


def test_processes_end_when_one_fails(monkeypatch):
    ended = []

    class Process:
        __init__ = lambda self, ranks: None  # noqa: E731
        wait_until_ready = train = lambda self, *_: (_ for _ in ()).throw(TrainingFailed("no"))
        close = lambda self: ended.append(self)  # noqa: E731

    monkeypatch.setattr(gpu, "TrainingProcess", Process)
    with pytest.raises(TrainingFailed):
        gpu.main(8, 2, [])
    assert len(ended) == 3


def test_a_field_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no field 'no_such_field'"):
        training.training_config(training.Run(overrides={"model.no_such_field": 1}))


def test_records_of_another_release_stay(runs, tmp_path, monkeypatch):
    path = tmp_path / "pretrain.jsonl"
    for release in ("0.6.2", "0.4.2", "0.4.2"):
        origin = {"versions": {"megatron-bridge": release}}
        monkeypatch.setattr(comparison, "provenance", lambda *_, origin=origin: origin)
        runs([2.05] * 8)
        gpu.main(8, 2, [], path)
    found = [json.loads(line)["versions"]["megatron-bridge"] for line in path.read_text().splitlines()]
    assert found == ["0.6.2"] * 3 + ["0.4.2"] * 3


def test_records_hold_every_run(runs, tmp_path):
    runs([2.05] * 8)
    path = tmp_path / "pretrain.jsonl"
    gpu.main(8, 2, ["--single"], path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["case"], r["mode"]) for r in records] == [
        ("single", "eager1"),
        ("single", "eager2"),
        ("single", "plugin"),
    ]
    assert records[2]["inside_spread"] is True


@pytest.mark.parametrize(
    "arguments, case",
    [
        ([], "mixed"),
        (["--single", "vision_cuda_graph_strict=true"], "single"),
        (["model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=[attn]"], "mixed_language_model"),
        (["model.cuda_graph_impl=full_iteration"], "mixed_full_iteration"),
        (["--single", "cuda_graph_scope=full_iteration"], "single_full_iteration"),
    ],
)
def test_the_case_names_what_is_on_graphs(arguments, case):
    assert comparison.case_of(arguments) == case


@pytest.mark.parametrize("replayed, encoder, same", [(6, 4, True), (0, 4, False), (6, 0, False), (6, None, True)])
def test_full_iteration_says_how_many_steps_were_replays(capsys, replayed, encoder, same):
    eager = [{**run_of(losses, None), "language_model_graphs": None} for losses in EAGER]
    whole = {"replays": 4 * replayed, "replayed_steps": replayed}
    graphs = {**run_of([2.05] * 8, encoder), "language_model_graphs": whole}
    assert comparison.compare(eager, graphs, ["model.cuda_graph_impl=full_iteration"], 8, None) is same
    assert f"replayed the whole language model: {replayed} of 8" in capsys.readouterr().out


def test_options_reach_the_single_runs(monkeypatch):
    line = ["--steps", "9", "--records", "out.jsonl", "--single", "--validate-every", "3", "a.b=1", "--eager-runs", "2"]
    monkeypatch.setattr(sys, "argv", ["photographs", *line])
    arguments = command.training_arguments(command.parse(), 9)
    assert arguments == ["--steps", "9", "a.b=1", "--single", "--validate-every", "3"]
    monkeypatch.setattr(sys, "argv", ["photographs", "--train", "graphs", "--out", "x.json", *arguments])
    again = command.parse()
    assert (again.steps, again.single, again.validate_every, again.overrides) == (9, True, 3, ["a.b=1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--also", "model.tuning={capture_mode: at_once}"],
            "must be name=value in YAML, not 'model.tuning={capture_mode:'",
        ),
        (["--also", "graphs"], "must be name=value, not 'graphs'"),
        (["=4"], "must be name=value, not '=4'"),
        (["model.tuning={"], "quotes may be missing"),
    ],
)
def test_overrides_that_no_run_could_take_are_refused_before_any_trains(words, message, capsys):
    with pytest.raises(SystemExit):
        command.parse(words)
    assert message in capsys.readouterr().err


def test_overrides_of_a_further_run_are_words_of_a_shell():
    assert command.parse(["--also", "a.b=1 'c={d: 2}'"]).also == [["a.b=1", "c={d: 2}"]]
