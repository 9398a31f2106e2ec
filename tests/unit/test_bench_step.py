"""The benchmark of training steps without a GPU: what is run, what records say, what the runs train."""

import itertools
import threading

import pytest

from bridge_cg_plugin.cli.runs.outputs import error_in
from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import bench_step
from scripts.performance.photographs import steps
from scripts.performance.photographs.comparison import SKIPPED
from scripts.performance.runs.processes import TrainingFailed

LOSSES = [4.0, 3.0, 2.0, 1.0] * 2


def result(ms, losses=LOSSES):
    return {
        "losses": list(losses),
        "grad_norms": [1.0] * len(losses),
        "step_ms": [9000.0] * SKIPPED + [ms] * (len(losses) - SKIPPED),
        "peak_gb": 30.0,
        "graphs": None,
        "language_model_layers": 0,
    }


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what each mode's training gives or raises; the runs' words are listed."""
    started, waiting = [], []

    def give(**by_mode):
        class Process:
            def __init__(self, log):
                waiting.append(self)

            def wait_until_ready(self):
                if by_mode.get("import_fails"):
                    raise TrainingFailed("ImportError: no stack")

            def train(self, mode, words):
                started.append((mode, list(words)))
                impl = next((w.partition("=")[2] for w in words if w.startswith("model.cuda_graph_impl")), mode)
                found = by_mode[impl]
                if isinstance(found, Exception):
                    raise found
                return found

            def close(self):
                waiting.remove(self)

        monkeypatch.setattr(steps, "TrainingProcess", Process)
        return started

    yield give
    assert not waiting


def bench(tmp_path, *line):
    out = tmp_path / "steps.jsonl"
    assert bench_step.main(["--out", str(out), "--steps", "8", *line]) == 0
    found = read_records(out)
    for one in found:
        check_record(one)
    return {(r["case"], r["mode"]): r for r in found}


def test_every_mode_beside_eager(runs, tmp_path):
    started = runs(
        eager=result(500.0),
        upstream=result(600.0, [8.0, *LOSSES[1:]]),
        graphs=result(250.0),
        transformer_engine=result(200.0),
        full_iteration=result(175.0),
    )
    found = bench(tmp_path, "--images", "mixed,large", "--language-models", "16x2048")
    assert [mode for mode, _ in started] == ["eager", "upstream", *["graphs"] * 3] * 2
    assert {key: r["ratio"] for key, r in found.items() if key[0] == "mixed_16x2048"} == {
        ("mixed_16x2048", "eager"): 1.0,
        ("mixed_16x2048", "upstream"): 1.2,
        ("mixed_16x2048", "plugin"): 0.5,
        ("mixed_16x2048", "plugin_language_model"): 0.4,
        ("mixed_16x2048", "plugin_full_iteration"): 0.35,
    }
    upstream = found["mixed_16x2048", "upstream"]
    assert upstream["loss_rel"] == 1.0 and upstream["overlap"] is False and "another function" in upstream["wrong"]
    assert found["large_16x2048", "plugin"]["loss_rel"] == 0.0 and found["large_16x2048", "plugin"]["overlap"]
    assert ["--large" in words for _, words in started] == [False] * 5 + [True] * 5
    assert all(words[:4] == ["--steps", "8", "--language-model", "16x2048"] for _, words in started)


def test_a_run_that_fails_has_a_record_with_the_error(runs, tmp_path):
    said = "training ended with status 1\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to\n[rank0]:end"
    runs(eager=TrainingFailed(said), graphs=result(250.0))
    found = bench(tmp_path, "--images", "mixed", "--language-models", "28x2560", "--modes", "eager,plugin")
    assert found["mixed_28x2560", "eager"]["error"].startswith("out of memory: torch.OutOfMemoryError")
    plugin = found["mixed_28x2560", "plugin"]
    assert plugin["ms"] == 250.0 and "ratio" not in plugin


@pytest.mark.parametrize(
    "text, expected",
    [
        ("status 1\nValueError: first\nnoise\n[rank0]: AssertionError: last\nmore", "AssertionError: last"),
        ("training ended with status -6\nnothing known", "training ended with status -6"),
    ],
)
def test_the_error_is_the_last_that_was_named(text, expected):
    assert error_in(text) == expected


def test_runs_share_the_gpu_as_far_as_its_memory_goes(runs, tmp_path, monkeypatch):
    beside, most, two = [], {}, threading.Event()

    def start(case):
        beside.append(case.mode)
        most[case.mode] = max(most.get(case.mode, 0), len(beside))
        if len(beside) == 2:
            two.set()
        if (case.images, case.mode) == ("mixed", "plugin"):
            assert two.wait(10), "the next run, single eager, has room beside it"
        beside.remove(case.mode)
        return result(500.0)

    runs()
    monkeypatch.setattr(steps, "gpu_gib", lambda: 128)
    monkeypatch.setattr(steps.Bench, "_measure", lambda self, process, case: start(case))
    found = bench(
        tmp_path, "--images", "mixed,single", "--language-models", "4x2048", "--modes", "eager,plugin,upstream"
    )
    assert len(found) == 6 and most["upstream"] == 1 and max(most.values()) == 2


@pytest.mark.parametrize("model, least, most", [("4x2048", 40, 50), ("16x2048", 50, 64), ("28x2560", 90, 120)])
def test_estimates_of_memory(model, least, most):
    assert least <= steps.Case("mixed", model, "plugin").gib <= most


def test_every_run_waits_for_its_turn(runs, tmp_path):
    started = runs(eager=result(500.0))
    bench(tmp_path, "--images", "mixed", "--language-models", "4x2048", "--modes", "eager")
    ((_, words),) = started
    said = dict(itertools.pairwise(words))
    assert (said["--timed-steps"], said["--loader-workers"], said["--distinct"]) == ("2", "0", "16")
    assert "--setup-in-turn" in words and "--turns" in words


def test_a_process_that_cannot_import_is_an_error_of_its_run(runs, tmp_path):
    started = runs(import_fails=True)
    found = bench(tmp_path, "--images", "mixed", "--modes", "eager")
    assert {r["error"] for r in found.values()} == {"ImportError: no stack"} and not started


def test_no_run_begins_when_the_time_is_used_up(runs, tmp_path):
    started = runs(eager=result(500.0))
    found = bench(tmp_path, "--images", "mixed", "--modes", "eager", "--seconds", "-1")
    assert not started and all("used up" in r["error"] for r in found.values())


def test_an_eager_record_of_another_commit_is_no_measure(runs, tmp_path, monkeypatch):
    runs(eager=result(500.0), graphs=result(250.0))
    line = ("--images", "mixed", "--language-models", "4x2048", "--modes")
    monkeypatch.setenv("BENCHMARK_COMMIT", "one")
    bench(tmp_path, *line, "eager")
    assert bench(tmp_path, *line, "plugin")["mixed_4x2048", "plugin"]["ratio"] == 0.5
    monkeypatch.setenv("BENCHMARK_COMMIT", "two")
    assert "ratio" not in bench(tmp_path, *line, "plugin")["mixed_4x2048", "plugin"]


@pytest.mark.parametrize(
    "line, said",
    [
        (["--steps", "6"], "--steps 6: it must be more than 6"),
        (["--modes", "eager,fast"], "--modes fast: it must"),
        (["--images", ""], "--images : it must"),
        (["--language-models", "4x1000"], "--language-models 4x1000: it must"),
        ([], "without a GPU. Pass --out FILE"),
    ],
)
def test_refused_command_lines(line, said, capsys):
    assert bench_step.main(line) == 2
    assert said in capsys.readouterr().err


# What the runs train


@pytest.fixture(scope="module")
def training():
    from scripts.performance.photographs import training

    return training


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("images", steps.IMAGES)
@pytest.mark.parametrize("language_model", steps.LANGUAGE_MODELS)
def test_the_words_of_every_run_are_understood(training, mode, images, language_model):
    from scripts.performance.photographs.arguments import parse

    told, words = steps.MODES[mode]
    line = ["--train", told, "--steps", "16", "--language-model", language_model, *steps.IMAGES[images], *words]
    run = training.run_of(parse(line))
    layers, width = map(int, language_model.split("x"))
    config = training.training_config(run)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.vision_config.out_hidden_size) == (layers, width, width)
    assert model.num_attention_heads % model.num_query_groups == 0
    assert model.vision_cuda_graph_impl == ("none" if mode == "eager" else "transformer_engine")
    impls = {"plugin_language_model": "transformer_engine", "plugin_full_iteration": "full_iteration"}
    assert model.cuda_graph_impl == impls.get(mode, "none")
    assert config.ddp.overlap_param_gather == (mode != "upstream") and run.upstream == (mode == "upstream")
    data = config.dataset
    patches = [height * width // 256 for height, width in data.sizes]
    assert data.most_images * max(patches) == run.longest()
    if mode == "upstream":
        assert model.max_vision_cuda_graph_seq_length == run.longest()
    # Every sample fits the sequence: an image's tokens, two marks and its caption.
    assert data.most_images * (max(patches) // 4 + 34) <= data.seq_length + 1


def test_a_run_of_upstreams_graphs_is_without_the_plugin(training, monkeypatch):
    """The processes that train are forked from one that has the plugin on."""
    import bridge_cg_plugin

    seen = []
    bridge_cg_plugin.activate()

    def pretrain(config, step, callbacks):
        from megatron.bridge.training import train

        seen.append((train.VisionTECudaGraphHelper.__module__, config.model.max_vision_cuda_graph_seq_length))

    monkeypatch.setattr(training, "pretrain", pretrain)
    try:
        training.train(training.Run(upstream=True, overlap=False))
        training.train(training.Run(impl="transformer_engine"))
    finally:
        bridge_cg_plugin.activate()
    assert seen == [
        ("megatron.core.transformer.cuda_graphs", 6912),
        ("bridge_cg_plugin.upstream.hooks.helpers.vision_helper", None),
    ]


def test_the_longest_sample_of_each_mix(training):
    found = {name: training.Run(single=name == "single", large=name == "large").longest() for name in steps.IMAGES}
    assert found == {"single": 784, "mixed": 6912, "large": 7056}


@pytest.mark.parametrize("text", ["4", "x2048", "0x2048", "4x", "4x1536", "ax2048", ""])
def test_other_language_models_are_refused(training, text):
    with pytest.raises(ValueError, match="--language-model .*: it must be LAYERSxWIDTH"):
        training.parse_language_model(text)


def test_the_default_is_what_the_main_job_trains(training):
    assert training.Run().language_model == training.parse_language_model("4x2048") == (4, 2048)
