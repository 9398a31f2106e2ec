"""Recipes without the hub: their mock data and whether graphs take it."""

import itertools
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from transformers.utils import hub

from bridge_cg_plugin.options import vision_options
from bridge_cg_plugin.recipes import with_graphs
from tests.models import local_hub

from .conftest import with_presets

pytestmark = with_presets
TASKS = "pretrain_mock", "sft", "peft"
RECIPES = [f"{model}_{task}_config" for model, task in zip(itertools.cycle(local_hub.MODELS), TASKS, strict=False)]
RECIPES.append("qwen25_vl_7b_sft_config")


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


def microbatch(name):
    """Return a recipe with graphs and mock data, and its first microbatch."""
    from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetBuilder

    config = with_graphs(name, gpu="h200", mock_data=True)
    config.dataset.num_base_examples = 4
    context = SimpleNamespace(train_samples=4, valid_samples=0, test_samples=0)
    data = MockVLMSFTDatasetBuilder(config.dataset).build(context)[0]
    return config, data.collate_fn([data[i] for i in range(config.train.micro_batch_size)])


def test_images_of_one_size(offline):
    config, batch = microbatch("gemma3_vl_4b_sft_config")
    count = config.train.micro_batch_size
    assert batch["visual_inputs"].pixel_values.shape == (count, 3, 896, 896)
    assert int((batch["input_ids"] == config.model.image_token_id).sum()) == 256 * count
    assert batch["loss_mask"].sum() > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_microbatch_fits_the_sequence_and_the_graphs(offline, name):
    config, batch = microbatch(name)
    count = config.train.micro_batch_size
    visual = batch["visual_inputs"]
    patches, size = int(visual.image_grid_thw.prod(-1).sum()), 14 if name.startswith("qwen25") else 16
    assert len(visual.image_grid_thw) == count and visual.pixel_values.shape == (patches, 6 * size * size)
    assert int((batch["input_ids"] == config.model.image_token_id).sum()) == patches // 4
    assert batch["loss_mask"].sum() > 0
    options = vision_options(config.model)
    assert options.exact_below < patches <= options.max_seq_length
