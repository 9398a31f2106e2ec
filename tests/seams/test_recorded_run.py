"""A recorded run with a recipe of Bridge, up to Bridge's training function, which is a fake."""

import importlib
import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from megatron.bridge.training.utils import train_utils
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.cli.runs import train as run_recipe
from bridge_cg_plugin.cli.runs.recipe import error_in
from scripts.performance.records import check_record

from .conftest import SFT

STEPS = 9


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed, self.decoder = nn.Identity(), nn.Identity()

    def forward(self, hidden_states, grid_thw):
        return hidden_states


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_model = Tower()


def fake_training(calls):
    """Fire a training's callbacks as Bridge's loop does: 3 images in each step of 9."""

    def train(config, forward_step_func, callbacks):
        calls.append(SimpleNamespace(config=config, step=forward_step_func, on=bridge_cg_plugin.status()["active"]))
        (recorder,) = callbacks
        state = SimpleNamespace(cfg=config, train_state=SimpleNamespace(floating_point_operations_so_far=0.0))
        model = Model()
        context = SimpleNamespace(state=state, model=[model], loss_dict=None, grad_norm=None)
        recorder.on_train_start(context)
        for step in range(config.train.train_iters):
            recorder.on_train_step_start(context)
            for images in (1, 2):
                model.vision_model(hidden_states=torch.zeros(4, 2), grid_thw=torch.ones(images, 3))
            context.loss_dict, context.grad_norm = {"lm loss": torch.tensor(9.0 - step)}, 1.0 + step
            recorder.on_train_step_end(context)
            state.train_state.floating_point_operations_so_far += 5e12
        recorder.on_train_end(context)

    return train


@pytest.fixture
def calls(sft, monkeypatch):
    made = []
    for mode in ("pretrain", "finetune"):
        monkeypatch.setattr(importlib.import_module(f"megatron.bridge.training.{mode}"), mode, fake_training(made))
    monkeypatch.setattr(run_recipe, "require_gpu", lambda: None)
    return made


def run(tmp_path, *words):
    record = tmp_path / "record.json"
    given = ["--record", str(record), "--recipe", SFT, *words, f"train.train_iters={STEPS}"]
    return run_recipe.main(given), record


def test_a_run_is_recorded(calls, tmp_path, capsys):
    status, record = run(tmp_path, "--vision_cuda_graph_impl", "none", "--cuda_graph_impl", "none")
    assert status == 0
    found = json.loads(record.read_text())
    check_record({"case": "c", "mode": "eager1", **found})
    assert found["losses"] == [9.0 - step for step in range(STEPS)]
    assert found["grad_norms"] == [1.0 + step for step in range(STEPS)]
    assert len(found["step_ms"]) == STEPS and found["repeats"] == STEPS - 6
    seconds = sum(found["step_ms"][6:]) / 1e3
    config = calls[0].config
    assert found["samples_per_s"] == pytest.approx(3 * config.train.global_batch_size / seconds)
    assert found["tokens_per_s"] == pytest.approx(found["samples_per_s"] * config.model.seq_length)
    assert found["tflops_per_gpu"] == pytest.approx(15 / seconds)
    assert found["graphs"] is None
    assert f"[compare] step {STEPS} of {STEPS}" in capsys.readouterr().out


def test_refused_input_is_one_line_that_compare_finds(calls, tmp_path, capsys):
    status, record = run(tmp_path, "train.train_itres=5")
    said = capsys.readouterr().err
    assert status == 2 and not record.exists() and calls == []
    assert error_in(said).startswith("Cannot use 'train.train_itres'")


WRITTEN = (
    *("iteration {:8d}/{:8d} |", "elapsed time per iteration (ms): {:.1f} |", "{}: {:.6E} |"),
    *("global batch size: {batch_size:5d} |", "grad norm: {grad_norm:.3f} |", "MODEL_TFLOP/s/GPU"),
    *("throughput per GPU (TFLOP/s/GPU): ", '"grad-norm"', '"iteration-time"', '"throughput/tflops/device"'),
    *('"throughput/samples_per_sec"', 'f"memory/{mem_stat}"', '"mem-max-allocated-bytes"'),
    'replace("bytes", "gigabytes")',
)


def test_bridge_still_writes_what_is_read():
    source = inspect.getsource(train_utils)
    assert [words for words in WRITTEN if words not in source] == []
