"""Recipes without the hub: their mock data and whether graphs take it, training on the weights that they begin with."""

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from transformers.utils import hub

from bridge_cg_plugin.cli.runs.recipe import prepare, read
from bridge_cg_plugin.options import normalize, vision_options
from bridge_cg_plugin.recipes import with_graphs
from scripts.performance import bench_recipe, random_weights
from tests.models import local_hub
from tests.models.local_hub import write_checkpoint

from .conftest import with_presets
from .test_recipes import launched

pytestmark = with_presets
TASKS = "pretrain_mock", "sft", "peft"
RECIPES = [f"{model}_{task}_config" for model, task in zip(itertools.cycle(local_hub.MODELS), TASKS, strict=False)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return local_hub.write_hub(tmp_path_factory.mktemp("hub"))["HF_HUB_CACHE"]


@pytest.fixture
def offline(cache, bridge, monkeypatch):
    """Bridge's recipes, with the cache as all that there is of the hub."""
    for module, name in ((constants, "HF_HUB_CACHE"), (hub, "HF_HUB_CACHE"), (hub, "TRANSFORMERS_CACHE")):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return bridge


@pytest.mark.parametrize("name", RECIPES)
def test_a_microbatch_fits_the_sequence_and_the_graphs(offline, name):
    from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetBuilder

    config = with_graphs(name, gpu="h200", mock_data=True)
    config.dataset.num_base_examples = 4
    context = SimpleNamespace(train_samples=4, valid_samples=0, test_samples=0)
    data = MockVLMSFTDatasetBuilder(config.dataset).build(context)[0]
    count = config.train.micro_batch_size
    batch = data.collate_fn([data[i] for i in range(count)])
    visual = batch["visual_inputs"]
    patches = int(visual.image_grid_thw.prod(-1).sum())
    assert len(visual.image_grid_thw) == count and visual.pixel_values.shape == (patches, 1536)
    assert int((batch["input_ids"] == config.model.image_token_id).sum()) == patches // 4
    assert batch["loss_mask"].sum() > 0
    options = vision_options(config.model)
    assert options.exact_below < patches <= options.max_seq_length


@pytest.fixture
def prepared(offline, tmp_path):
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
    assert not normalize(runs["eager1"])[0].enabled
    options = normalize(runs["plugin"])[0]
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
