"""Bridge's pretrain(), unmodified, with vision graphs; every run is a process of its own."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.gpu.conftest import ROOT


def train(tmp_path, mode: str, *arguments: str, steps: int = 8) -> dict:
    out = tmp_path / f"{mode}.json"
    command = [sys.executable, "-m", "examples.photographs", "--train", mode, "--small", "--steps", str(steps)]
    command += ["--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "MASTER_PORT": str(29700 + os.getpid() % 200)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return {**json.loads(out.read_text()), "output": done.stdout}


BUCKETS = ("vision_cuda_graph_buckets=[2304,4608,8192]", "vision_cuda_graph_strict=true")
# Layer graphs have a pool for every layer, each with its own attention workspace.
FEW = ("vision_cuda_graph_buckets=[1024,2304]", "vision_cuda_graph_max_frames=16")
CHECKED = ("vision_cuda_graph_check_interval=2", "vision_cuda_graph_check_action=stop")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        # Without overlap: Bridge's overlapped reduction, eager too, needs a gradient of every parameter in the last
        # microbatch of a step.
        ("--text-only-every", "3", "--no-overlap"),
    ],
    ids=["overlap", "text-only"],
)
def test_evaluation_and_checks(tmp_path, arguments):
    largest = "max_vision_cuda_graph_seq_length=8192"
    run = train(tmp_path, "graphs", "--validate-every", "4", *arguments, *CHECKED, largest)
    buckets = run["graphs"]["buckets"].values()
    assert run["graphs"]["fallbacks"] == {}
    assert sum(b["evaluations"] for b in buckets) > 0
    assert sum(b["replays"] for b in buckets) > 0
    assert len(run["checks"]) >= 2
    assert all(math.isfinite(loss) for loss in run["losses"])
    assert "eager fallbacks: none" in run["output"]


@pytest.mark.parametrize(
    "fields",
    [
        ("freeze_vision_model=true",),
        ("freeze_vision_projection=true",),
        ("freeze_vision_model=true", "freeze_vision_projection=true"),
        ("vision_cuda_graph_scope=[attn]", *FEW),
        ("vision_cuda_graph_scope=[mlp]", *FEW),
    ],
    ids=["frozen-encoder", "frozen-projection", "frozen-both", "attn", "mlp"],
)
def test_first_losses_equal_eager(tmp_path, fields):
    eager = train(tmp_path, "eager", *[f for f in fields if "freeze" in f], steps=6)
    graphs = train(tmp_path, "graphs", *BUCKETS, *fields, steps=6)
    assert graphs["graphs"]["replays"] > 0
    assert graphs["losses"][:4] == pytest.approx(eager["losses"][:4], rel=2e-4)
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-3)


@pytest.mark.parametrize("modules", ["attn,mlp", "attn", "mlp", ""], ids=["attn-mlp", "attn", "mlp", "whole-layer"])
def test_language_model_graphs_beside_vision_graphs(tmp_path, modules):
    words = ("model.cuda_graph_impl=transformer_engine", f"model.cuda_graph_modules=[{modules}]")
    eager = train(tmp_path, "eager", steps=8)
    graphs = train(tmp_path, "graphs", *BUCKETS, *words, steps=8)
    assert graphs["graphs"]["replays"] > 0
    assert graphs["language_model_layers"] == 4
    assert graphs["losses"][:4] == pytest.approx(eager["losses"][:4], rel=2e-4)
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-3)


@pytest.mark.parametrize("vision", ["transformer_engine", "none"])
def test_the_whole_language_model_on_a_graph(tmp_path, vision):
    words = ("model.cuda_graph_impl=full_iteration", f"vision_cuda_graph_impl={vision}", "--text-only-every", "3")
    common = ("--validate-every", "4", "--no-overlap")
    eager = train(tmp_path, "eager", *common, "--text-only-every", "3", steps=8)
    graphs = train(tmp_path, "graphs", *BUCKETS, *words, *common, steps=8)
    whole = graphs["language_model_graphs"]
    assert whole["fallbacks"] == {} and whole["replayed_steps"] == 5
    assert sum(b["evaluations"] for b in whole["buckets"].values()) > 0
    assert bool(graphs["graphs"]) == (vision == "transformer_engine")
    assert graphs["losses"][:4] == pytest.approx(eager["losses"][:4], rel=2e-4)
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-3)


def test_the_whole_language_model_beside_overlapped_communication(tmp_path):
    eager = train(tmp_path, "eager", steps=8)
    graphs = train(tmp_path, "graphs", *BUCKETS, "model.cuda_graph_impl=full_iteration", steps=8)
    assert graphs["language_model_graphs"]["replayed_steps"] == 5 and graphs["graphs"]["replays"] > 0
    assert graphs["losses"][:4] == pytest.approx(eager["losses"][:4], rel=2e-4)
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-3)


def test_dropout_inside_the_whole_language_model(tmp_path):
    words = ("hidden_dropout=0.1", "attention_dropout=0.1")
    eager = train(tmp_path, "eager", *words, steps=8)
    graphs = train(tmp_path, "graphs", *BUCKETS, "model.cuda_graph_impl=full_iteration", *words, steps=8)
    assert graphs["language_model_graphs"]["replayed_steps"] == 5
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-2)


def test_checkpoint_resume(tmp_path):
    folder = str(tmp_path / "checkpoint")
    whole = train(tmp_path, "graphs", *BUCKETS, steps=8)
    train(tmp_path, "graphs", "--save", folder, *BUCKETS, steps=4)
    resumed = train(tmp_path, "graphs", "--save", folder, "--load", folder, *BUCKETS, steps=8)
    assert len(resumed["losses"]) == 4
    assert resumed["graphs"]["replays"] > 0
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=5e-3)
