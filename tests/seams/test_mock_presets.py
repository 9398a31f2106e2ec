"""Mock data of recipes, made by Bridge from a hub's cache that was made here, and whether graphs take it."""

import itertools
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from transformers import Qwen3VLConfig
from transformers.utils import hub

from bridge_cg_plugin.cli.runs.recipe import prepare, read
from bridge_cg_plugin.options import vision_options
from bridge_cg_plugin.recipes import with_graphs
from bridge_cg_plugin.upstream.hooks.configuration import recipes
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from tests.gpu import test_presets
from tests.models import local_hub

from .test_recipes import gpus_of

pytestmark = pytest.mark.skipif(
    not recipes.PATCHES[0].seam.expected_in(bridge_release()),
    reason="the recipes are those of a later megatron-bridge",
)
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


@pytest.mark.parametrize("name", test_presets.RECIPES)
def test_what_the_gpu_tests_override_is_taken(offline, name):
    words = [
        "--recipe",
        name,
        "--dry-run",
        *test_presets.GRAPHS,
        *test_presets.WORDS,
        *test_presets.RECIPES[name].words,
    ]
    config = prepare(*read(words)).config
    assert test_presets.RECIPES[name].own == gpus_of(offline, name)
    assert config.train.train_iters == test_presets.STEPS
    assert config.train.global_batch_size % config.train.micro_batch_size == 0
    assert vision_options(config.model).check_interval < test_presets.STEPS


def test_bridge_takes_weights_that_are_written_here_for_a_checkpoint(tmp_path):
    from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir

    language_model = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0], "out_hidden_size": 32}
    Qwen3VLConfig(
        text_config={**language_model, "head_dim": 16, "intermediate_size": 64, "vocab_size": 128},
        vision_config={**vision, "intermediate_size": 64},
    ).save_pretrained(tmp_path)
    assert not is_hf_checkpoint_dir(str(tmp_path))
    local_hub.write_weights(tmp_path)
    assert is_hf_checkpoint_dir(str(tmp_path))
