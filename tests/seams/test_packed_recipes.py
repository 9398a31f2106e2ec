"""The presets of language models on packed documents beside Bridge's own recipes."""

import pickle
from dataclasses import replace

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import recipes
from bridge_cg_plugin.options import OptionError, packed_options
from bridge_cg_plugin.recipes import PACKED_PRESETS, PACKED_RECIPES
from bridge_cg_plugin.recipes.packed import build_packed
from bridge_cg_plugin.upstream.hooks import recipe_names
from bridge_cg_plugin.upstream.seams.patches import bridge_release

from .test_recipes import changed, gpus_of, launched, table

GRAPH_FIELDS = {
    "model.cuda_graph_impl",
    "model.cuda_graph_modules",
    "model.cuda_graph_scope",
    "model.cuda_graph_max_packed_seqs",
    "model.use_te_rng_tracker",
    "rng.te_rng_tracker",
}
OFFLINE_FIELDS = {"dataset.pad_to_max_length", "dataset.offline_packing_specs.pad_cu_seqlens"}

pytestmark = pytest.mark.skipif(
    not recipe_names.PATCHES[0].seam.expected_in(bridge_release()),
    reason="the presets derive from recipes of a later megatron-bridge",
)
every_preset = pytest.mark.parametrize("preset", PACKED_PRESETS, ids=lambda p: p.name)


@every_preset
def test_it_differs_from_bridges_recipe_in_graph_fields_only(bridge, preset):
    before, after = getattr(bridge, preset.base)(), getattr(bridge, preset.name)()
    offline = getattr(before.dataset, "enable_offline_packing", False)
    assert changed(before, after) == (GRAPH_FIELDS | OFFLINE_FIELDS if offline else GRAPH_FIELDS)


@every_preset
def test_it_validates_as_a_launch_would(bridge, preset):
    config = getattr(bridge, preset.name)()
    launched(config, gpus_of(bridge, preset.base))
    options = packed_options(config.model)
    assert options.max_packed_seqs == preset.max_packed_seqs and config.model.cuda_graph_modules == []
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker


@every_preset
def test_bridges_own_recipe_packs_without_graphs(bridge, preset):
    config = getattr(bridge, preset.base)()
    launched(config, gpus_of(bridge, preset.base))
    data = config.dataset
    assert getattr(data, "enable_offline_packing", False) or data.enable_in_batch_packing
    assert config.model.cuda_graph_impl == "none"


@every_preset
def test_validation_includes_the_plugins(bridge, preset):
    config = getattr(bridge, preset.name)()
    config.model.hidden_dropout = 0.1
    with pytest.raises(OptionError, match="hidden_dropout"):
        launched(config, gpus_of(bridge, preset.base))


def test_a_hybrid_a_dense_model_and_a_vision_language_model_are_among_them(bridge):
    from bridge_cg_plugin.options import facts_of
    from bridge_cg_plugin.options.sources import collect

    configs = {preset.model: getattr(bridge, preset.name)() for preset in PACKED_PRESETS}
    hybrid = {name: facts_of(collect(config)).mamba for name, config in configs.items()}
    assert hybrid == {"nemotron_3_nano_4b": True, "qwen3_8b": False, "qwen3_vl_8b": False}
    assert type(configs["qwen3_8b"].model).__name__ == "GPTModelProvider"
    vision_language = configs["qwen3_vl_8b"]
    assert hasattr(vision_language.model, "vision_cuda_graph_impl")
    assert PACKED_PRESETS[2].max_packed_seqs >= vision_language.train.micro_batch_size > 1


def test_the_vision_encoder_may_be_on_graphs_too(bridge):
    config = bridge.qwen3_vl_8b_packed_graphs_sft_config()
    assert config.model.vision_cuda_graph_impl == "none"
    config.model.vision_cuda_graph_impl = "transformer_engine"
    launched(config, gpus_of(bridge, "qwen3_vl_8b_sft_config"))
    assert packed_options(config.model).enabled


@every_preset
def test_a_launcher_finds_it_and_it_goes_with_the_plugin(bridge, preset):
    recipe = getattr(bridge, preset.name)
    assert recipe is PACKED_RECIPES[preset.name] is getattr(recipes, preset.name)
    assert preset.name in recipes.__all__ and pickle.loads(pickle.dumps(recipe)) is recipe
    assert preset.base in recipe.__doc__
    bridge_cg_plugin.deactivate()
    assert not hasattr(bridge, preset.name)
    with pytest.raises(RuntimeError, match=rf"activate\(\).*{preset.base}"):
        recipe()


def test_a_preset_without_its_recipe_says_which(active):
    with pytest.raises(RuntimeError, match="nemotron_9_sft_config.*0.6"):
        build_packed(replace(PACKED_PRESETS[0], model="nemotron_9"))


def test_the_documented_presets_are_the_presets(bridge):
    expected = [
        (p.name, p.base, str(gpus_of(bridge, p.base)), str(getattr(bridge, p.base)().dataset.seq_length))
        + (str(p.max_packed_seqs),)
        for p in PACKED_PRESETS
    ]
    assert table("Packed documents") == expected
