"""Recipes trained on the weights that they begin with, as bench_recipe.py has them: built, validated, not loaded."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.runs.recipe import prepare, read
from bridge_cg_plugin.upstream.hooks.graph_fields import read_options
from scripts.performance import bench_recipe, random_weights
from tests.models.local_hub import write_checkpoint

from .conftest import with_presets
from .test_mock_presets import cache, offline  # noqa: F401
from .test_recipes import launched

pytestmark = with_presets


@pytest.fixture
def prepared(offline, tmp_path):  # noqa: F811
    args, rest = bench_recipe.parse([])

    def build(mode):
        words = bench_recipe.words(args, rest, mode, Path(checkpoint))
        return prepare(*read(words))

    checkpoint = write_checkpoint(tmp_path)
    return build


def test_eager_and_graphs_train_the_same_configuration_but_for_graphs(prepared):
    runs = {mode: prepared(mode).config for mode in ("eager1", "plugin")}
    for config in runs.values():
        launched(config, 1)
        assert config.train.global_batch_size == 8 and config.rng.te_rng_tracker and config.peft is not None
    assert not read_options(runs["eager1"]).enabled
    options = read_options(runs["plugin"])
    assert options.vision.enabled and options.packed.enabled and options.vision.kernels == "exact"


def test_adapters_get_the_initial_weights_and_nothing_is_loaded(prepared, active, monkeypatch):
    setup = importlib.import_module(random_weights.SETUP)
    monkeypatch.setattr(setup, random_weights.LOADER, getattr(setup, random_weights.LOADER))
    random_weights.keep_initial_weights()
    config = prepared("plugin").config
    model, adapted = object(), []
    config.peft = SimpleNamespace()
    monkeypatch.setattr(setup, "_apply_peft_transformation", lambda peft, given: adapted.append(given) or given)
    timer = SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)
    timers = type("Timers", (), {"__call__": lambda self, *_, **__: timer, "log": lambda self, names: None})()
    hook = setup._create_peft_pre_wrap_hook(config, SimpleNamespace(timers=timers))
    assert hook([model]) == [model] and adapted == [[model]]
