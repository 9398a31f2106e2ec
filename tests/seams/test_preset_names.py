"""Presets by name: where Bridge's launchers look for recipes, and among the plugin's own functions."""

import importlib
import pickle

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import recipes
from bridge_cg_plugin.recipes import DERIVED_RECIPES, PRESETS, RECIPES
from bridge_cg_plugin.upstream.hooks.configuration.recipes import PATCHES
from bridge_cg_plugin.upstream.seams.patches import bridge_release

BRIDGE = "megatron.bridge.recipes"

pytestmark = pytest.mark.skipif(
    not PATCHES[0].seam.expected_in(bridge_release()),
    reason="the presets derive from recipes of a later megatron-bridge",
)


def test_a_name_says_what_bridges_launchers_read_from_it():
    """They choose the forward step by the name's beginning and the mode by one of these parts."""
    words = ("pretrain", "sft", "finetune", "dora", "peft", "lora")
    for preset in PRESETS:
        assert RECIPES[preset.name].__name__ == preset.name and preset.base in RECIPES[preset.name].__doc__
        assert preset.name.startswith(preset.base.partition("b_")[0])
        assert [word for word in words if f"_{word}_" in preset.name] == [
            word for word in words if f"_{word}_" in preset.base
        ]


def test_no_name_is_upstreams(bridge):
    bridge_cg_plugin.deactivate()
    perf = importlib.import_module("megatron.bridge.perf_recipes.qwen_vl")
    for package in (bridge, importlib.import_module(f"{BRIDGE}.qwen_vl"), perf):
        assert not set(RECIPES) & set(dir(package))


def test_the_names_go_away_with_the_plugin(active):
    packages = [active[patch.module] for patch in PATCHES]
    bridge_cg_plugin.deactivate()
    before = [list(vars(package).items()) for package in packages]
    for _ in range(3):
        bridge_cg_plugin.activate()
        assert all(set(DERIVED_RECIPES) <= set(vars(package)) for package in packages)
        bridge_cg_plugin.deactivate()
        for package, snapshot in zip(packages, before, strict=True):
            after = list(vars(package).items())
            assert [name for name, _ in after] == [name for name, _ in snapshot]
            assert all(now is then for (_, now), (_, then) in zip(after, snapshot, strict=True))


def test_a_preset_needs_the_plugin(bridge):
    recipe = bridge.qwen3_vl_8b_vision_graphs_h200_sft_config
    bridge_cg_plugin.deactivate()
    with pytest.raises(RuntimeError, match=r"activate\(\).*qwen3_vl_8b_sft_config"):
        recipe()


def test_presets_are_functions_of_their_package():
    for name, recipe in RECIPES.items():
        assert getattr(recipes, name) is recipe and name in recipes.__all__
        assert pickle.loads(pickle.dumps(recipe)) is recipe
