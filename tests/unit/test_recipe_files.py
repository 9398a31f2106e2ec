"""Bridge's recipes as their files tell them, and those that switch upstream's own vision graphs on."""

from pathlib import Path

import pytest

from bridge_cg_plugin.cli.recipe_files import RecipeFiles


@pytest.fixture
def bridge(tmp_path):
    """Return a function that writes a file below the recipes of a Bridge, and the files."""
    recipes = tmp_path / "megatron/bridge/recipes"

    def write(path, text):
        file = recipes / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("__init__.py", "from megatron.bridge.recipes.vl import *\n")
    write("vl/__init__.py", "from .sizes import *\nfrom .h100 import large_config as named_config\n")
    write("utils/datasets.py", "def build_dataset_config(config, name): ...\n")
    write(
        "vl/sizes.py",
        '__all__ = ["small_config", "large_config", "tuned_config"]\n'
        "from .common import base\n"
        "def small_config():\n    return base()\n"
        "def large_config():\n    config = base()\n    config.model.vision_cuda_graph_impl = 'none'\n"
        "def tuned_config():\n    return graphs(small_config())\n"
        "def left_out_config(): ...\n"
        "def graphs(config):\n    config.model.vision_cuda_graph_impl = 'transformer_engine'\n",
    )
    write("vl/h100.py", "def large_config():\n    return Provider(vision_cuda_graph_impl=IMPL)\n")
    write("vl/common.py", "def base(): ...\n")
    return write, RecipeFiles([Path(tmp_path, "megatron")])


def test_recipes_are_what_the_packages_export(bridge):
    _, files = bridge
    assert files.names() == {"small_config", "large_config", "tuned_config", "named_config"}


def test_recipes_that_switch_upstreams_graphs_on_are_found_through_what_they_call(bridge):
    write, files = bridge
    # Functions of one name count as one.
    assert files.with_upstreams_graphs() == ["large_config", "named_config", "tuned_config"]


def test_a_recipe_that_switches_them_off_is_none_of_these(bridge):
    write, files = bridge
    write("vl/h100.py", "def large_config():\n    return Provider(vision_cuda_graph_impl='none')\n")
    assert files.with_upstreams_graphs() == ["tuned_config"]


def test_without_bridge_there_are_none(tmp_path):
    files = RecipeFiles([tmp_path])
    assert files.names() == set() and files.with_upstreams_graphs() == []
