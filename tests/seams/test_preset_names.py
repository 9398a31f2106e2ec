"""Presets by name: where Bridge's launchers look for recipes, and what the plugin adds to upstream's modules."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.recipes import DERIVED_RECIPES, PRESETS, RECIPES
from bridge_cg_plugin.recipes.presets import recipe_of
from bridge_cg_plugin.upstream.hooks.recipes import PATCHES, recipe_names
from bridge_cg_plugin.upstream.seams import patches
from bridge_cg_plugin.upstream.seams.patches import Additions, bridge_release
from bridge_cg_plugin.upstream.seams.seam import Seam

from .conftest import with_presets

A, B = list(RECIPES)[:2]
SEAM = Seam(name="names", module="m", target="", kind="module", touch="patched", purpose="for a test")


@pytest.mark.parametrize("held, taken", [("upstream's", True), (RECIPES[A], False)], ids=["upstream's", "a copy"])
def test_names_that_upstream_has_stay_upstreams(held, taken):
    """The package's star import of a family's names leaves a copy of ours, which goes as well."""
    module = SimpleNamespace(base=len, **{A: held})
    names = Additions(SEAM, {A: RECIPES[A], B: RECIPES[B]})
    names.apply(module)
    assert vars(module) == {"base": len, A: held, B: RECIPES[B]}
    assert names.state == "active" and (A in names.reason) == taken and B not in names.reason
    names.revert()
    assert vars(module) == {"base": len, **({A: held} if taken else {})}


@pytest.mark.parametrize("always", [{}, {B: RECIPES[B]}], ids=["derived", "and others"])
def test_a_release_of_before_the_recipes_gets_what_derives_from_none(monkeypatch, always):
    monkeypatch.setattr(patches, "bridge_release", lambda: "0.5.1")
    module, names = SimpleNamespace(base=len), Additions(replace(SEAM, since="0.6.2"), {A: RECIPES[A]}, always)
    names.apply(module)
    assert vars(module) == {"base": len, **always}
    assert names.state == ("active" if always else "native") and "0.6.2" in names.reason
    names.revert()
    assert vars(module) == {"base": len}


def test_what_is_no_class_gets_nothing():
    module, added = ModuleType("m"), Additions(replace(SEAM, target="Kind", kind="class"), {"method": len})
    module.Kind = len
    added.apply(module)
    assert added.state == "broken" and "m.Kind is no class" in added.reason


def test_a_preset_without_its_recipe_says_which(active):
    preset = replace(PRESETS[0], base="qwen9_vl_sft_config")
    with pytest.raises(RuntimeError, match="qwen9_vl_sft_config.*0.6"):
        recipe_of(preset)()


@pytest.mark.skipif(bridge_release()[:3] != "0.6", reason="older releases lie over files of the newest one here")
def test_the_names_that_stand_ins_have_are_those_that_packages_have(active):
    """`bridge-cg recipes` lists what `build_recipe` finds, and no helper such as `build_dataset_config`."""
    code = "from bridge_cg_plugin.cli.explain.recipes import recipes_of_bridge; print(*recipes_of_bridge())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == recipe_names() - set(RECIPES)


def test_the_command_lists_the_presets_that_this_release_has(bridge, active, capsys):
    assert main(["recipes", "--json", "vision_graphs"]) == 0
    assert json.loads(capsys.readouterr().out)["presets"] == sorted(name for name in RECIPES if hasattr(bridge, name))


def test_a_name_says_what_bridges_launchers_read_from_it():
    """They choose the forward step by the name's beginning and the mode by one of these parts."""
    words = ("pretrain", "sft", "finetune", "dora", "peft", "lora")
    for preset in PRESETS:
        assert RECIPES[preset.name].__name__ == preset.name and preset.base in RECIPES[preset.name].__doc__
        assert preset.name.startswith(preset.base.partition("b_")[0])
        assert [word for word in words if f"_{word}_" in preset.name] == [
            word for word in words if f"_{word}_" in preset.base
        ]


@with_presets
def test_the_names_go_away_with_the_plugin_and_are_not_upstreams(bridge, active):
    packages = [active[patch.module] for patch in PATCHES]
    recipe = bridge.qwen3_vl_8b_vision_graphs_h200_sft_config
    bridge_cg_plugin.deactivate()
    with pytest.raises(RuntimeError, match=r"activate\(\).*qwen3_vl_8b_sft_config"):
        recipe()
    for package in (*packages, importlib.import_module("megatron.bridge.perf_recipes.qwen_vl")):
        assert not set(RECIPES) & set(dir(package))
    before = [list(vars(package).items()) for package in packages]
    for _ in range(3):
        bridge_cg_plugin.activate()
        assert all(set(DERIVED_RECIPES) <= set(vars(package)) for package in packages)
        bridge_cg_plugin.deactivate()
        assert [list(vars(package).items()) for package in packages] == before
