"""One job by every route, on CPU executors: recipe, script, `train`, `enable`, variable, config of a loop, example."""

import copy
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.cli.runs import recipe as command
from bridge_cg_plugin.recipes import with_graphs
from bridge_cg_plugin.upstream.hooks import any_loop
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from examples import plain_loop
from tests.unit.packs import new_qwen, pack
from tests.unit.towers import bridges_step, draw, loss_of, new_tower

from .conftest import SFT as RECIPE
from .loops import Policy, on_cpu, run_schedule

pytestmark = pytest.mark.usefixtures("sft", "loop")

BATCH = ([[1, 4, 6]], (100, 150, 50), 0)


class Job(Policy):
    """A model with an encoder and a language model over packs, whose config knows nothing of the plugin."""

    def __init__(self):
        nn.Module.__init__(self)
        self.vision_model, self.language_model = new_tower(), new_qwen(cuda_graph_impl="none")
        self.config = copy.copy(self.language_model.config)
        vars(self.config).update(timers=None, calculate_per_token_loss=False, cuda_graph_warmup_steps=1)

    def forward(self, rows, documents, seed):
        hidden, deepstack = self.vision_model(*draw(rows, seed))
        return loss_of([hidden, *deepstack]) + self.language_model(**pack(documents, seed)).mean()

    def zero_grad_buffer(self): ...


def in_bridges_loop(model, config):
    """Train as `pretrain` does with a configuration: its validation, then steps."""
    config.dataset.enable_in_batch_packing = True
    config.model.cuda_graph_warmup_steps = 1
    check_training_config(config)
    for _ in range(3):
        bridges_step([model], config.model, lambda: model(*BATCH).backward())


def in_another_loop(model):
    for _ in range(3):
        run_schedule(model, [BATCH] * 2, forward_only=False)


def by_recipe(model, monkeypatch):
    in_bridges_loop(model, with_graphs(RECIPE))


def by_script(model, monkeypatch):
    config = build_recipe(RECIPE)
    config.model.cuda_graphs = "exact"
    in_bridges_loop(model, config)


def by_train(model, monkeypatch):
    fields = vars(build_recipe(RECIPE).dataset)
    packing = next(name for name in ("enable_in_batch_packing", "pack_sequences_in_batch") if name in fields)
    parsed, words = command.read(["--recipe", RECIPE, "--cuda_graphs", "exact", f"dataset.{packing}=true"])
    in_bridges_loop(model, command.prepare(parsed, words).config)


def by_variable(model, monkeypatch):
    monkeypatch.setenv(any_loop.OPTIONS, "cuda_graphs=exact")
    in_bridges_loop(model, build_recipe(RECIPE))


def by_variable_in_a_loop(model, monkeypatch):
    monkeypatch.setenv(any_loop.OPTIONS, "cuda_graphs=exact")
    in_another_loop(model)


def by_enable(model, monkeypatch):
    bridge_cg_plugin.enable([model], "cuda_graphs=exact")
    in_another_loop(model)


def by_config(model, monkeypatch):
    """As verl, slime and NeMo-RL do: the words of a configuration become attributes of the model's config."""
    model.config.cuda_graphs = "exact"
    in_another_loop(model)


def by_the_example(model, monkeypatch):
    def step(batches, chunk):
        loss = chunk(*BATCH)
        return loss, lambda output: (output, {"loss": output.detach().clone()})

    optimizer = SimpleNamespace(zero_grad=model.zero_grad, step=lambda: None)
    bridge_cg_plugin.enable([model], {"cuda_graphs": "exact"})
    with mock.patch.object(torch, "zeros", on_cpu):
        assert len(list(plain_loop.train([model], optimizer, step, count(), steps=3))) == 3


ROUTES = [by_recipe, by_script, by_train, by_variable, by_variable_in_a_loop, by_enable, by_config, by_the_example]
SAME = "cuda_graphs=exact: vision encoder: the whole encoder; language model: all layers as one region over packed"


@pytest.mark.parametrize("route", ROUTES)
def test_one_job_has_the_same_parts_on_graphs_by_every_route(route, monkeypatch, capsys):
    model = Job()
    route(model, monkeypatch)
    graphs = active_graphs()
    assert [each.model for each in graphs] == [model.vision_model, model.language_model.decoder]
    assert all(each.captured and each.statistics().replays for each in graphs)
    assert graphs[0].workload.options.kernels == "exact"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "vision encoder:" in line]
    assert line == f"[bridge-cg] {SAME} sequences"
