"""scripts/performance/run_recipe.py with Bridge's own recipes, up to the call of Bridge's pretrain or finetune."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs import train as run_recipe
from bridge_cg_plugin.options import normalize
from bridge_cg_plugin.upstream.hooks import recipes
from bridge_cg_plugin.upstream.hooks.training_config import refused_start
from bridge_cg_plugin.upstream.seams.patches import bridge_release

from .conftest import SFT
from .explained import table

VISION = ["--vision_cuda_graph_impl", "transformer_engine", "--max-vision-cuda-graph-seq-length", "16384"]
BATCH = ("train.micro_batch_size=2", "train.global_batch_size=6")
DETERMINISTIC = ("model.deterministic_mode=true", "model.cross_entropy_loss_fusion=false")
CHECKPOINT = "checkpoint.pretrained_checkpoint=/"


@pytest.fixture
def trained(sft, monkeypatch):
    """What Bridge's training functions were called with."""
    calls = []
    for mode in ("pretrain", "finetune"):
        record = lambda mode=mode, **kwargs: calls.append((mode, kwargs))  # noqa: E731
        monkeypatch.setattr(importlib.import_module(f"megatron.bridge.training.{mode}"), mode, record)
    monkeypatch.setattr(run_recipe, "require_gpu", lambda: None)
    return calls


def run(*words):
    return run_recipe.main(["--recipe", SFT, *words])


def test_flags_then_words_reach_training(trained, capsys):
    from megatron.bridge.models.qwen_vl.qwen3_vl_step import forward_step

    words = ["train.train_iters=7", "model.vision_cuda_graph_buckets=[1024,2304]", "optimizer.lr=1e-5"]
    assert run(*VISION, "--vision_cuda_graph_buckets", "64,128", *words) == 0
    ((mode, call),) = trained
    config = call["config"]
    assert mode == "finetune" and call["forward_step_func"] is forward_step
    assert (config.train.train_iters, config.optimizer.lr) == (7, 1e-5)
    vision = normalize(config)[0].vision
    assert (vision.impl, vision.max_seq_length, vision.buckets) == ("transformer_engine", 16384, (1024, 2304))
    assert config.rng.te_rng_tracker is True and config.model.use_te_rng_tracker is True
    assert "buckets of 1024 and 2304 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words, said",
    [
        (["checkpoint.load=/"], ""),
        ([CHECKPOINT, "model.tensor_model_parallel_size=8"], ""),  # nobody said how many GPUs there are
        (
            [CHECKPOINT, "model.tensor_model_parallel_size=8", "--launcher", "torchrun", "--gpus-per-node", "3"],
            "Cannot train on 3 GPUs: model.tensor_model_parallel_size=8 needs a multiple of 8",
        ),
        (
            [CHECKPOINT, "model.tensor_model_parallel_size=2", "model.context_parallel_size=2", "--gpus-per-node", "6"],
            "model.tensor_model_parallel_size=2 and model.context_parallel_size=2 need a multiple of 4",
        ),
        (["checkpoint.pretrained_checkpoint=/absent"], "pretrained_checkpoint='/absent': it must be a folder that"),
        (["checkpoint.pretrained_checkpoint=msc://bucket/run"], ""),
        (
            [CHECKPOINT, *BATCH, "--gpus-per-node", "8", "model.tensor_model_parallel_size=2"],
            "a multiple of train.micro_batch_size=2 times 4 data-parallel replicas. Write a multiple of 8.",
        ),
        ([CHECKPOINT, "model.num_query_groups=3"], f"Cannot start {SFT}: Bridge refuses it. num_query_groups"),
        ([CHECKPOINT, *DETERMINISTIC], "Bridge refuses it. NCCL_ALGO must be one of"),
    ],
)
def test_a_dry_run_refuses_what_could_not_start(trained, capsys, monkeypatch, words, said):
    assert run("--dry-run", *words) == (2 if said else 0)
    assert said in capsys.readouterr().err


OFFLOADED = "model.cpu_offloading=true"
OFFLOADS = "eager (model.cpu_offloading=True: it must be false with cuda_graph_impl"
DOCUMENTS = "cuda_graph_max_packed_seqs=64"
MXFP8 = "mixed_precision=bf16_with_mxfp8_mixed"
FP8 = "mixed_precision=bf16_with_fp8_current_scaling_mixed"
TENSORS = "model.tensor_model_parallel_size"


@pytest.mark.parametrize(
    "recipe, words, runs, why",
    [
        (SFT, [DOCUMENTS], "graphs", "up to 64 documents"),
        (SFT, [OFFLOADED], "eager", OFFLOADS),
        (SFT, [OFFLOADED, DOCUMENTS], "eager", OFFLOADS),
        ("qwen3_vl_30b_a3b_sft_config", [OFFLOADED], "eager", OFFLOADS),
        (SFT, [MXFP8], "eager", "eager (model.fp8_recipe='mxfp8': it must be tensorwise, delayed, blockwise with"),
        (SFT, [FP8.replace("_with_fp8_", "-with-fp8-"), f"{TENSORS}=1"], "graphs", "packed"),
        (SFT, [FP8, f"{TENSORS}=2"], "eager", f"eager ({TENSORS}=2: it must be 1 with"),
    ],
)
def test_a_dry_run_prints_what_explain_names_and_trains_nothing(trained, capsys, monkeypatch, recipe, words, runs, why):
    monkeypatch.setenv("COLUMNS", "10000")
    words = [recipe, "cuda_graphs=exact", CHECKPOINT, *words]
    assert run_recipe.main(["--recipe", *words, "--dry-run"]) == 0
    head, *printed = capsys.readouterr().out.splitlines()
    assert head == f"{recipe}: finetune() with qwen3_vl_step" and trained == []
    explained = table(capsys, *words)
    for line, part in zip(printed, explained.values(), strict=True):
        assert line == "; ".join([f"{part['part']}: {part['runs']}", part["why"], *part["options"]])
    assert explained["vision encoder"]["runs"] == "graphs"
    assert explained["language model"]["runs"] == runs and why in explained["language model"]["why"]


def test_a_dry_run_needs_no_checkpoint_and_training_does(trained, capsys, monkeypatch):
    assert run("--dry-run", "checkpoint.load=/absent") == 0
    said = "Cannot fine-tune without a checkpoint, and there is no run to resume in checkpoint.load=/absent."
    assert f"to train: {said}" in " ".join(capsys.readouterr().out.split()) and trained == []
    assert said in first_look.refusal(["--recipe", SFT, "checkpoint.load=/absent"])
    monkeypatch.setenv("COLUMNS", "80")
    assert run("--dry-run", CHECKPOINT, "cuda_graphs=exact") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_bridges_checks_change_neither_the_configuration_nor_the_process(sft, bridge, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    config = getattr(bridge, sft)()
    config.env_vars, config.checkpoint.pretrained_checkpoint = {"TOLD_BY_SFT": "1"}, "/"
    config.model.deterministic_mode, config.model.cross_entropy_loss_fusion = True, False
    state = lambda: (  # noqa: E731
        str(config.to_dict()),
        dict(os.environ),
        torch.are_deterministic_algorithms_enabled(),
        torch.distributed.is_initialized(),
    )
    before = state()
    assert refused_start(config, 2) == ""
    assert state() == before


def test_a_dry_run_among_workers_knows_how_many_there_are(trained, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run("--dry-run", CHECKPOINT, "model.tensor_model_parallel_size=2") == 2
    assert "Cannot train on 3 GPUs" in capsys.readouterr().err


@pytest.fixture
def imports(monkeypatch):
    """The modules that each process imports that a test runs."""
    found, run = [], subprocess.run

    def noted(*command, **settings):
        done = run(*command, **settings)
        found.append(set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)))
        return done

    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setattr(subprocess, "run", noted)
    return found


@pytest.mark.parametrize(
    "words, said",
    [
        (["model.num_layers=abc"], "Cannot use model.num_layers='abc': it must be a whole number. Correct the value."),
        (["--step_func", "qwen_vl_step"], "Did you mean qwen3_vl_step"),
    ],
)
def test_a_first_look_refuses_before_pytorch_is_imported(sft, imports, words, said):
    assert said in first_look.refusal(["--recipe", sft, "--dry-run", *words])
    assert "bridge_cg_plugin.cli.explain.recipes" in imports[0] and "torch._C" not in imports[0]


def test_a_dry_run_out_of_reach_of_the_hub_is_answered_by_the_first_look(sft, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    command = ["--recipe", sft, "--dry-run", "cuda_graphs=exact"]
    status, said = first_look.looked(command)
    assert status == first_look.ALONE and said.startswith(
        f"{sft}: finetune() with qwen3_vl_step\nvision encoder: graphs"
    )
    assert "to train: Cannot fine-tune without a checkpoint" in said and first_look.NOT_BUILT in said
    done = subprocess.run([sys.executable, run_recipe.__file__, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{said}\n")
    snapshot = tmp_path / "models--Qwen--Qwen3-VL-8B-Instruct" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert first_look.looked(command)[0] == 0


def test_without_flags_the_recipe_is_trained_as_bridge_has_it(trained, bridge):
    assert run() == 0
    (_, call) = trained[0]
    assert json.dumps(call["config"].to_dict(), default=str) == json.dumps(
        getattr(bridge, SFT)().to_dict(), default=str
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian.train_iters=5"], "Did you mean train?"),
        (["+train.train_itres=5"], "Did you mean train.train_iters"),
        (["model.vision_cuda_graph_bukets=[64]"], "Did you mean model.vision_cuda_graph_buckets"),
        (["checkpoint.load=[5"], "Hydra"),
        (["stray"], "section.name=value"),
        (["--cuda_graph_impl", "full_iteration"], "=True: it must be false with cuda_graph_impl=full_iteration"),
    ],
)
def test_refused_input_ends_with_status_2_and_what_to_do(trained, capsys, words, said):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert said in err and out == "" and trained == []


def test_the_model_follows_the_datasets_sequence_length(trained):
    assert run("dataset.seq_length=1024") == 0
    config = trained[0][1]["config"]
    assert config.model.seq_length == config.dataset.seq_length == 1024
    assert run("dataset.seq_length=1024", "model.seq_length=2048") == 0
    assert trained[1][1]["config"].model.seq_length == 2048


@pytest.mark.parametrize("step", recipes.STEPS)
def test_steps_are_in_the_newest_release(step):
    if not bridge_release().startswith("0.6."):
        pytest.skip("an older release lacks some")
    module, attribute = recipes.STEPS[step]
    spec = importlib.util.find_spec(module)
    assert spec is not None and attribute in Path(spec.origin).read_text()


def test_process_groups_end_where_they_started(trained, monkeypatch, tmp_path):
    """Bridge leaves its process groups behind after an end that it did not foresee; a caller's are the caller's."""
    distributed, ours = torch.distributed, not torch.distributed.is_initialized()
    store = f"file://{tmp_path}/store"
    start = lambda **_: distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)  # noqa: E731
    if ours:
        with monkeypatch.context() as patched:
            patched.setattr(importlib.import_module("megatron.bridge.training.finetune"), "finetune", start)
            assert run() == 0 and not distributed.is_initialized()
        start()
    assert run() == 0 and distributed.is_initialized()
    if ours:
        distributed.destroy_process_group()


def test_without_a_gpu_it_ends_before_the_recipe_is_built(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run() == 2
    assert "PyTorch sees no NVIDIA GPU" in capsys.readouterr().err
