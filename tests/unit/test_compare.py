"""`bridge-cg compare`: what it starts, what it makes of runs that end well, fail or hang."""

import json
import shlex
import sys
import time
from dataclasses import replace

import pytest
import torch

from bridge_cg_plugin.cli.report.sources import runs_in
from bridge_cg_plugin.cli.runs import compare, recipe
from bridge_cg_plugin.options import normalize
from bridge_cg_plugin.options.flags import given_flags
from bridge_cg_plugin.upstream.hooks.overrides import graph_words

RECIPE = "qwen3_vl_some_pretrain_config"
# A run: prints steps and writes a record, or does what its mode is told to.
FAKE = """
import json, os, sys, time
print("port", os.environ["MASTER_PORT"])
kind, told, record = sys.argv[1], json.loads(sys.argv[2]), sys.argv[-1]
told = told.get(kind, {})
for step in range(1, 9):
    print(f"[compare] step {step} of 8", flush=True)
time.sleep(told.get("sleep", 0))
if "say" in told:
    print(told["say"])
    sys.exit(told.get("status", 1))
losses = [9.0 - step for step in range(8)]
losses[4] += told.get("off", 0.0)
versions = {"megatron-bridge": "0"}
graphs = {"replays": 16 if kind == "plugin" else 0, "fallbacks": {"no_free_slot": 2}, "padding_share": 0.1,
          "memory_bytes": 2**30, "static_bytes": 0, "capture_seconds": 1.0, "warmup_microbatches": 6, "buckets": {}}
json.dump({"ms": told.get("ms", 100.0), "step_ms": [told.get("ms", 100.0)] * 8, "losses": losses,
           "grad_norms": losses, "peak_gb": 3.0, "graphs": graphs if kind == "plugin" else None,
           "images_per_s": 12.0, "tokens_per_s": 4096.0, "repeats": 2, "seed": 1, "date": "2026-11-21",
           "gpu": "NVIDIA H200", "versions": versions}, open(record, "w"))
"""


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    """Run the command with fake runs; returns (status, records by mode, folder)."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    out = tmp_path / "out"

    def run(told=None, *words):
        real = compare.plan

        def plan(args, rest):
            fake = (sys.executable, str(script))
            return [replace(r, command=(*fake, r.kind, json.dumps(told or {}))) for r in real(args, rest)]

        monkeypatch.setattr(compare, "plan", plan)
        monkeypatch.setattr(compare, "refusal", lambda *_: "")
        monkeypatch.setattr(compare, "require_gpu", lambda: None)
        status = compare.main(["--recipe", RECIPE, "--steps", "8", "--out", str(out), *words])
        monkeypatch.setattr(compare, "plan", real)
        return status, {r.mode: r for r in runs_in(out / "compare.jsonl")}, out

    return run


def test_runs_have_a_port_of_their_own_unless_one_is_given(comparing, monkeypatch):
    for given in ("", "4711"):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        if given:
            monkeypatch.setenv("MASTER_PORT", given)
        said = comparing({"plugin": {"say": "where"}})[2] / "eager1.log"
        port = int(said.read_text().partition("port ")[2].split()[0])
        assert port == int(given) if given else 20_000 <= port < 30_000


def test_all_modes_make_one_page(comparing, capsys):
    status, runs, out = comparing({"plugin": {"ms": 50.0}, "upstream": {"off": 3.0}})
    assert status == 0
    assert list(runs) == ["eager1", "eager2", "eager3", "upstream", "plugin"]
    assert runs["plugin"].graphs["vision"].replays == 16 and runs["plugin"].images_per_s == 12.0
    said = capsys.readouterr().out
    assert "plugin (5 of 5): steps are in" in said and "plugin: 50.0 ms a step (" in said
    assert "SAME plugin" in said and "DIFFERENT upstream" in said
    page = json.loads((out / "page.json").read_text())
    assert {v["mode"]: v["state"] for v in page["verdicts"]} == {"upstream": "different", "plugin": "same"}
    assert "computes another function" in (out / "page.md").read_text()
    assert "step 8 of 8" in (out / "eager2.log").read_text()


def test_a_mode_that_fails_is_shown_and_stops_no_other(comparing, capsys):
    told = {"upstream": {"say": "Traceback\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried | to"}}
    status, runs, out = comparing(told)
    assert status == 0 and runs["upstream"].error.startswith("out of memory: torch.OutOfMemoryError")
    assert runs["plugin"].losses
    assert "failed: out of memory" in capsys.readouterr().out
    assert "Tried" in (out / "page.md").read_text()


def test_a_failed_plugin_run_is_status_1(comparing):
    status, runs, _ = comparing({"plugin": {"say": "no exception here", "status": 7}})
    assert status == 1
    assert runs["plugin"].error == "the process ended with status 7; its last line: no exception here"


def test_a_plugin_that_trains_another_model_is_status_1(comparing):
    status, _, out = comparing({"plugin": {"off": 1.0}})
    assert status == 1 and "**DIFFERENT** plugin" in (out / "page.md").read_text()


def test_a_run_that_hangs_is_ended(comparing):
    began = time.monotonic()
    status, runs, _ = comparing({"upstream": {"sleep": 600}}, "--time_limit", "8")
    assert time.monotonic() - began < 120
    assert status == 0 and runs["upstream"].error == "not finished after 8 s (--time_limit)"


# The command line


@pytest.fixture(autouse=True)
def any_recipe(monkeypatch):
    monkeypatch.setattr(compare.first_look, "refusal", lambda *_: "")


def dry(capsys, *words):
    assert compare.main(["--recipe", RECIPE, "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {mode: shlex.split(command) for mode, _, command in (line.partition(": ") for line in lines)}


def test_a_dry_run_prints_the_commands(capsys):
    commands = dry(capsys, "--steps", "12", "optimizer.lr=1e-5")
    assert list(commands) == ["eager1", "eager2", "eager3", "upstream", "plugin"]
    for command in commands.values():
        assert command[1].endswith("recorded_run.py") and command[-2:] == ["optimizer.lr=1e-5", "train.train_iters=12"]
    assert commands["eager1"] == commands["eager2"]


def test_graph_options_are_the_plugins(capsys):
    graphs = [
        "--vision_cuda_graph_tuning",
        "slots=2",
        "--max-vision-cuda-graph-seq-length",
        "4096",
        "--cuda_graph_impl",
        "none",
    ]
    commands = dry(capsys, *graphs, "model.vision_cuda_graph_buckets=[64]", "train.global_batch_size=4")
    wanted = {"eager1": ["--vision_cuda_graph_impl", "none", "--cuda_graph_impl", "none", "train.global_batch_size=4"]}
    wanted["upstream"] = ["--cuda_graphs", "null", "--vision_cuda_graph_impl", "transformer_engine"]
    wanted["upstream"] += [*("--max_vision_cuda_graph_seq_length", "4096", "--cuda_graph_impl", "none")]
    for mode, words in wanted.items():
        assert set(words) <= set(commands[mode])
        assert not {"--vision_cuda_graph_tuning", "model.vision_cuda_graph_buckets=[64]"} & set(commands[mode])
    assert {*graphs, "model.vision_cuda_graph_buckets=[64]"} <= set(commands["plugin"])


def test_the_plugins_run_has_the_one_setting_that_was_given(capsys):
    commands = dry(capsys)
    start = commands["plugin"].index("--cuda_graphs")
    assert commands["plugin"][start : start + 2] == ["--cuda_graphs", "exact"]
    for words in (["--cuda_graphs", "fastest"], ["model.cuda_graphs=fastest"]):
        commands = dry(capsys, *words)
        parsed, rest = recipe.read(commands["plugin"][4:])
        assert normalize(given_flags(parsed), graph_words(rest))[0].choice.setting == "fastest"
        assert not {"fastest", *words[1:], "model.cuda_graphs=fastest"} & {*commands["eager1"], *commands["upstream"]}


@pytest.mark.parametrize("kind, images", [("eager", False), ("upstream", True)])
def test_graphs_that_the_setting_of_a_recipe_would_choose_are_off_in_the_other_runs(kind, images):
    parsed, rest = recipe.read(["--recipe", RECIPE, *compare.words_of(kind, [], images)])
    packing = {"cuda_graphs": "exact", "cuda_graph_max_packed_seqs": 8, "pack_sequences_in_batch": True}
    options = normalize(packing, given_flags(parsed), graph_words(rest))[0]
    assert not options.language_model.enabled and not options.packed.enabled
    assert options.vision.enabled == (kind == "upstream" and images) and options.vision.kernels == "auto"


def test_several_gpus_run_under_torchrun(capsys):
    command = dry(capsys, "--gpus_per_node", "4", "--modes", "plugin")["plugin"]
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "6"], "Cannot use --steps 6: it must be a whole number of at least 7"),
        (["--modes", "eager,plugn"], "Cannot use --modes eager,plugn: it must be any of eager, upstream, plugin"),
        (["--launcher", "torchrun"], "Cannot use --launcher torchrun: it must be none"),
        (["train.train_iters=50"], "train.train_iters='50': it must be what --steps says"),
        (["--vision_cuda_graph_bukets", "2"], "Did you mean --vision_cuda_graph_buckets"),
        (["--vision_cuda_graph_tuning", "slots=0"], "Cannot use --vision_cuda_graph_tuning slots=0: it"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(capsys, words, says):
    assert compare.main(["--recipe", RECIPE, *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out


def test_a_refused_recipe_ends_with_its_reason_before_anything_runs(tmp_path, monkeypatch, capsys):
    script = tmp_path / "run_recipe.py"
    script.write_text(
        "import sys; print('noise\\nCannot use recipe=1: it must be 2. Mend it.\\nmore', file=sys.stderr); sys.exit(2)"
    )
    monkeypatch.setattr(compare, "RECIPE", script)
    monkeypatch.setattr(compare, "require_gpu", lambda: None)
    assert compare.main(["--recipe", RECIPE, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "Cannot use recipe=1: it must be 2. Mend it.\n"
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_nothing_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compare.main(["--recipe", RECIPE, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "PyTorch sees no NVIDIA GPU. Train where there is one, or add --dry-run.\n"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_takes_no_files_is_refused_before_anything_trains(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(compare, "refusal", lambda *_: "")
    monkeypatch.setattr(compare, "require_gpu", lambda: None)
    assert compare.main(["--recipe", RECIPE, "--out", str(tmp_path / "file" / "folder")]) == 2
    assert capsys.readouterr().err.startswith(f"Cannot write to --out {tmp_path / 'file'}")
