"""Names added to Bridge's recipe packages, and taken off again."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.recipes import PRESETS, RECIPES
from bridge_cg_plugin.recipes.presets import build
from bridge_cg_plugin.upstream.hooks.configuration import recipes
from bridge_cg_plugin.upstream.hooks.configuration.recipes import AddedNames
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import Seam

A, B = list(RECIPES)[:2]
SEAM = Seam(name="names", module="m", target="", kind="module", touch="patched", purpose="for a test")


def test_names_that_upstream_has_stay_upstreams():
    module = SimpleNamespace(base=len, **{A: "upstream's"})
    names = AddedNames(SEAM, {A: RECIPES[A], B: RECIPES[B]})
    names.apply(module)
    assert vars(module) == {"base": len, A: "upstream's", B: RECIPES[B]}
    assert names.state == "active" and A in names.reason and B not in names.reason
    names.revert()
    assert vars(module) == {"base": len, A: "upstream's"}


def test_what_somebody_put_in_a_names_place_stays():
    module = SimpleNamespace(base=len)
    names = AddedNames(SEAM, {A: RECIPES[A], B: RECIPES[B]})
    names.apply(module)
    setattr(module, A, print)
    names.look()
    assert names.state == "broken" and A in names.reason
    names.revert()
    assert vars(module) == {"base": len, A: print}


def test_a_star_import_of_the_family_leaves_nothing_behind():
    """The package imports the family's names; a copy of ours must go as well."""
    module = SimpleNamespace(base=len, **{A: RECIPES[A]})
    names = AddedNames(SEAM, {A: RECIPES[A]})
    names.apply(module)
    assert names.reason == ""
    names.revert()
    assert vars(module) == {"base": len}


def test_a_release_of_before_the_recipes_gets_no_presets(monkeypatch):
    monkeypatch.setattr(recipes, "bridge_release", lambda: "0.5.1")
    module, names = SimpleNamespace(base=len), AddedNames(replace(SEAM, since="0.6.2"), {A: RECIPES[A]})
    names.apply(module)
    assert vars(module) == {"base": len}
    assert names.state == "native" and "0.6.2" in names.reason


def test_a_release_of_before_the_recipes_gets_what_derives_from_none(monkeypatch):
    monkeypatch.setattr(recipes, "bridge_release", lambda: "0.5.1")
    module, names = (
        SimpleNamespace(base=len),
        AddedNames(replace(SEAM, since="0.6.2"), {A: RECIPES[A]}, {B: RECIPES[B]}),
    )
    names.apply(module)
    assert vars(module) == {"base": len, B: RECIPES[B]}
    assert names.state == "active" and "0.6.2" in names.reason
    names.revert()
    assert vars(module) == {"base": len}


def test_a_preset_without_its_recipe_says_which(active):
    preset = replace(PRESETS[0], base="qwen9_vl_sft_config")
    with pytest.raises(RuntimeError, match="qwen9_vl_sft_config.*0.6"):
        build(preset)


@pytest.mark.skipif(bridge_release()[:3] != "0.6", reason="older releases lie over files of the newest one here")
def test_the_names_that_stand_ins_have_are_those_that_packages_have(active):
    """`bridge-cg recipes` lists what `build_recipe` finds, and no helper such as `build_dataset_config`."""
    code = "from bridge_cg_plugin.cli.explain.recipes import recipes_of_bridge; print(*recipes_of_bridge())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == recipes.recipe_names() - set(RECIPES)
