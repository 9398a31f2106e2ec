"""`bridge-cg compare`: what it starts, what it makes of runs that end well, fail or hang."""

import json
import shlex
import sys

import pytest

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
told, record = json.loads(sys.argv[1]), sys.argv[-1]
kind = os.path.basename(record).removesuffix(".json")
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
           "tokens_per_s": 4096.0, "repeats": 2, "seed": 1, "date": "2026-11-21",
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
            return dict.fromkeys(real(args, rest), [sys.executable, str(script), json.dumps(told or {})])

        monkeypatch.setattr(compare, "plan", plan)
        monkeypatch.setattr(compare, "refusal", lambda *_: "")
        monkeypatch.setattr(compare, "require_gpu", lambda: None)
        status = compare.main(["--recipe", RECIPE, "--steps", "8", "--out", str(out), *words])
        monkeypatch.setattr(compare, "plan", real)
        return status, {r.mode: r for r in runs_in(out / "compare.jsonl")}, out

    return run


def test_all_runs_make_one_page(comparing, capsys):
    told = {"plugin": {"ms": 50.0}, "eager3": {"say": "[rank0]: torch.OutOfMemoryError: CUDA out of memory. T"}}
    status, runs, out = comparing(told)
    assert status == 1 and list(runs) == ["eager1", "eager2", "eager3", "plugin"]
    assert runs["plugin"].graphs["vision"].replays == 16
    assert runs["eager3"].error.startswith("out of memory: torch.OutOfMemoryError")
    said = capsys.readouterr().out
    assert "plugin (4 of 4): steps are in" in said and "plugin: 50.0 ms a step (" in said and "SAME plugin" in said
    page = json.loads((out / "page.json").read_text())
    assert {v["mode"]: v["state"] for v in page["verdicts"]} == {"plugin": "same"}
    assert "out of memory" in (out / "page.md").read_text() and "step 8 of 8" in (out / "eager2.log").read_text()


@pytest.mark.parametrize(
    ("told", "error", "status"),
    [
        ({}, "", 0),
        ({"off": 1.0}, "", 1),
        ({"say": "no exception", "status": 7}, "the process ended with status 7; its last line: no exception", 1),
        ({"sleep": 600}, "not finished after 3 s (--time_limit)", 1),
    ],
    ids=["same", "another model", "fails", "hangs"],
)
def test_the_status_is_of_the_plugins_run(comparing, told, error, status):
    found, runs, out = comparing({"plugin": told}, "--time_limit", "3")
    assert (found, runs["plugin"].error) == (status, error)
    assert ("**DIFFERENT** plugin" in (out / "page.md").read_text()) == ("off" in told)


# The command line


@pytest.fixture(autouse=True)
def any_recipe(monkeypatch):
    monkeypatch.setattr(compare.first_look, "refusal", lambda *_: "")


def dry(capsys, *words):
    assert compare.main(["--recipe", RECIPE, "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {mode: shlex.split(command) for mode, _, command in (line.partition(": ") for line in lines)}


def test_a_dry_run_prints_the_commands_with_graph_options_in_the_plugins(capsys):
    graphs = ["--vision_cuda_graph_slots", "2", "--max-vision-cuda-graph-seq-length", "4096"]
    graphs.append("model.vision_cuda_graph_buckets=[64]")
    commands = dry(capsys, "--steps", "12", "--gpus_per_node", "4", *graphs, "optimizer.lr=1e-5")
    assert list(commands) == ["eager1", "eager2", "eager3", "plugin"]
    for command in commands.values():
        assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
        assert command[5].endswith("train.py") and command[-2:] == ["optimizer.lr=1e-5", "train.train_iters=12"]
    assert commands["eager1"] == commands["eager2"]
    assert {*graphs} <= {*commands["plugin"]} and {*graphs}.isdisjoint(commands["eager1"])


@pytest.mark.parametrize("words", [["--cuda_graphs", "fastest"], ["model.cuda_graphs=fastest"], []])
def test_the_plugins_run_has_the_one_setting_that_was_given(capsys, words):
    commands = dry(capsys, *words)
    parsed, rest = recipe.read(commands["plugin"][2:])
    setting = normalize(given_flags(parsed), graph_words(rest))[0].choice.setting
    assert setting == ("fastest" if words else "exact")


def test_graphs_that_the_setting_of_a_recipe_would_choose_are_off_in_eager_runs():
    parsed, rest = recipe.read(["--recipe", RECIPE, *compare.eager_words([])])
    packing = {"cuda_graphs": "exact", "cuda_graph_max_packed_seqs": 8, "pack_sequences_in_batch": True}
    options = normalize(packing, given_flags(parsed), graph_words(rest))[0]
    assert not options.enabled and not options.packed.enabled


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "6"], "Cannot use steps=6: it must be a whole number of at least 7"),
        (["--launcher", "torchrun"], "Cannot use launcher='torchrun': it must be none"),
        (["train.train_iters=50"], "train.train_iters='50': it must be what --steps says"),
        (["--vision_cuda_graph_bukets", "2"], "Did you mean --vision_cuda_graph_buckets"),
        (["--vision_cuda_graph_slots", "0"], "Cannot use vision_cuda_graph_slots='0': it"),
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
