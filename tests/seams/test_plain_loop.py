"""The example of a loop of its own: it trains on a CPU eager and on graphs, and compares both."""

import inspect
import json

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel

import bridge_cg_plugin
from bridge_cg_plugin.recipes.captioned_images import FEW_SIZES
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from examples import plain_jobs, plain_loop
from examples.photographs import plain_runs
from examples.photographs.images import PhotographDataset

STEPS = 8


@pytest.fixture(autouse=True)
def loop(active):
    LOOPS.forget()
    yield
    bridge_cg_plugin.deactivate()
    bridge_cg_plugin.activate()


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Runs train in this process; returns what each was told."""
    told = []

    class Process:
        def __init__(self, module):
            assert module == plain_loop.__name__

        def wait_until_ready(self): ...

        def close(self): ...

        def train(self, mode, arguments):
            told.append((mode, *arguments))
            return trained(tmp_path, "--train", mode, *arguments)

    monkeypatch.setattr(plain_runs, "TrainingProcess", Process)
    return told


def trained(folder, *words):
    out = folder / "run.json"
    assert plain_loop.main([*words, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_on_graphs_every_microbatch_after_warm_up_replays_or_says_why(tmp_path):
    graphs = trained(tmp_path, "--steps", str(STEPS), "cuda_graph_warmup_steps=2")["graphs"]
    after = sum(plain_loop.MICROBATCHES[step % 3] for step in range(2, STEPS))
    assert graphs["replays"] + sum(graphs["fallbacks"].values()) == after
    assert graphs["replays"] > after / 2 and set(graphs["fallbacks"]) <= {"not_captured_yet"}


def test_the_comparison_says_same(here, capsys):
    words = ["--compare", "--eager-runs", "2", "--steps", str(STEPS)]
    assert plain_loop.main([*words, "vision_cuda_graph_strict=true"]) == 0
    assert "verdict: SAME" in capsys.readouterr().out
    told = ("--steps", str(STEPS), "vision_cuda_graph_strict=true")
    assert here == [("eager", *told), ("graphs", *told), ("eager", *told)]


def test_the_comparison_says_different_where_nothing_replays(here, monkeypatch, capsys):
    monkeypatch.setattr(bridge_cg_plugin, "enable", lambda *_: None)
    assert plain_loop.main(["--compare", "--eager-runs", "2", "--steps", str(STEPS)]) == 1
    assert "verdict: DIFFERENT" in capsys.readouterr().out


def test_the_gpus_step_calls_qwen3_vl_with_a_batch_of_photographs(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **unused: tensor)
    samples = PhotographDataset(2, 2048, 2, FEW_SIZES, 1, 0)

    def model(**arguments):
        inspect.signature(Qwen3VLModel.forward).bind(None, **arguments)
        assert len(arguments["pixel_values"]) == arguments["image_grid_thw"].prod(-1).sum()
        return torch.where(arguments["loss_mask"] > 0, 3.0, 1e9)  # what is masked does not count

    losses, loss_of = plain_jobs._caption_step(iter([samples.collate_fn([samples[0]])]), model)
    assert losses.shape == (1, 2048)
    loss, told = loss_of(losses)
    assert loss == told["loss"] == 3
