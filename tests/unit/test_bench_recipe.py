"""The benchmark of full-size recipes without a GPU: what is run, what records hold, what is refused."""

from pathlib import Path

import pytest

from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs.recipe import read
from bridge_cg_plugin.cli.runs.results import read_records
from bridge_cg_plugin.options import normalize
from bridge_cg_plugin.options.flags import given_flags
from bridge_cg_plugin.upstream.hooks.overrides import graph_words
from examples.photographs.processes import TrainingFailed
from scripts.performance import bench_recipe
from scripts.performance.records import check_record

STEPS = WARM_UP + 2
GRAPHS = {"memory_bytes": 3 * 2**30, "capture_seconds": 2.5, "replays": 8}
LORA = "qwen3_vl_8b_peft_config"


def result(ms, losses=None, **graphs):
    kinds = dict.fromkeys(("graphs", "language_model_graphs", "packed_graphs")) | graphs
    losses = [9.0 - step for step in range(STEPS)] if losses is None else losses
    run = {"ms": ms, "step_ms": [ms] * STEPS, "losses": losses, "grad_norms": [1.0] * STEPS, "peak_gb": 30.0}
    return {**run, **kinds}


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what each mode's training gives or raises; the runs' words are listed, in order."""
    started, ranks_of = {}, []

    def give(**by_mode):
        give.ranks = ranks_of

        class Process:
            def __init__(self, log, ranks, module, environment):
                ranks_of.append(ranks)
                assert module == bench_recipe.WORKER and environment["HF_HUB_OFFLINE"] == "1"
                assert environment["HF_HUB_CACHE"].startswith(environment["HF_HOME"])

            def wait_until_ready(self):
                pass

            def train(self, mode, words):
                started[mode] = words
                if isinstance(by_mode[mode], Exception):
                    raise by_mode[mode]
                return by_mode[mode]

            def close(self):
                pass

        monkeypatch.setattr(bench_recipe, "TrainingProcess", Process)
        monkeypatch.setattr(bench_recipe, "refusal", lambda *_: "")
        monkeypatch.setattr(bench_recipe, "write_files", lambda *_: None)
        return started

    return give


def measure(out, *line):
    status = bench_recipe.main(["--out", str(out), "--steps", str(STEPS), *line])
    found = read_records(out)
    for record in found:
        check_record(record)
    return status, {record["mode"]: record for record in found}


def test_graphs_are_recorded_beside_eager(runs, tmp_path, capsys):
    packed = {**GRAPHS, "memory_bytes": 2**30, "capture_seconds": 4.0}
    runs(eager1=result(200.0), plugin=result(80.0, graphs=GRAPHS, packed_graphs=packed), eager2=result(201.0))
    status, found = measure(tmp_path / "r.jsonl")
    assert status == 0 and list(found) == ["eager1", "plugin", "eager2"]
    plugin = found["plugin"]
    assert plugin["case"] == "8b_lora" and plugin["ratio"] == 0.4 and plugin["gpus"] == 1
    assert (plugin["memory_gb"], plugin["capture_s"], plugin["loss_rel"]) == (4.0, 6.5, 0.0)
    assert plugin["inside_spread"] is True and plugin["repeats"] == 2 and found["eager2"]["ratio"] == 1.005
    assert "memory_gb" not in found["eager1"] and "inside_spread" not in found["eager1"]
    said = capsys.readouterr().out
    assert "plugin: 80.0 ms a step; peak 30.0 GiB; ratio 0.400" in said


def test_a_run_that_fails_is_recorded_and_stops_no_other(runs, tmp_path, capsys):
    runs(
        eager1=result(200.0),
        plugin=TrainingFailed("ended", "its stack\ntorch.OutOfMemoryError: CUDA out of memory."),
        eager2=result(2.0),
    )
    status, found = measure(tmp_path / "r.jsonl")
    assert "its stack" in capsys.readouterr().err
    assert status == 1 and found["plugin"]["error"].startswith("out of memory: ") and "ms" in found["eager2"]


def options_of(words):
    """The graph options that a run's words set on LoRA's recipe, whose data are packed."""
    parsed, rest = read(words)
    held = {"cuda_graphs": "exact", "enable_in_batch_packing": True}
    return normalize(held, given_flags(parsed), graph_words(rest))[0]


def test_eager_has_no_graphs_and_each_mode_of_graphs_has_its_setting(runs, tmp_path):
    started = runs(eager1=result(200.0), plugin=result(80.0), plugin_fastest=result(70.0))
    words = ["--vision_cuda_graph_tuning", "slots=2", "optimizer.lr=1e-5"]
    measure(tmp_path / "r.jsonl", "--eager-runs", "1", "--modes", "plugin,plugin_fastest", "--recipe", LORA, *words)
    assert not options_of(started["eager1"]).enabled and "optimizer.lr=1e-5" in started["eager1"]
    for mode, setting in {"plugin": "exact", "plugin_fastest": "fastest"}.items():
        options = options_of(started[mode])
        assert options.choice.setting == setting and options.vision.slots == 2
        assert options.vision.enabled and options.packed.enabled


def test_all_runs_have_the_same_images_steps_and_weights(runs, tmp_path):
    started = runs(eager1=result(200.0), plugin=result(80.0))
    measure(tmp_path / "r.jsonl", "--eager-runs", "1", "--global-batch", "4")
    for words in started.values():
        steps = f"train.train_iters={STEPS}"
        assert {"dataset.image_size=[1024,768]", "train.global_batch_size=4", steps} <= set(words)
        assert {"rng.seed=1234", "rng.te_rng_tracker=true"} <= set(words) and "--mock_data" in words
        (checkpoint,) = (word for word in words if word.startswith("checkpoint.pretrained_checkpoint="))
        assert Path(checkpoint.partition("=")[2]).name == "checkpoint"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--case", "8b_sft_tp2", "--gpus", "1"], "model.tensor_model_parallel_size=2 needs a multiple of 2"),
        (
            ["--recipe", "qwen3_8b_sft_config"],
            "Cannot use --recipe qwen3_8b_sft_config: it must be a recipe or preset of",
        ),
        (["--vision_cuda_graph_bukets", "2"], "Did you mean --vision_cuda_graph_buckets"),
        (["--global-batch", "3"], "train.global_batch_size must be a multiple of train.micro_batch_size=2, not 3"),
        (["train.trian_iters=4"], "Did you mean train.train_iters"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.setattr(bench_recipe, "TrainingProcess", None)
    assert bench_recipe.main(["--out", str(tmp_path / "r.jsonl"), *line]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "r.jsonl").exists()
