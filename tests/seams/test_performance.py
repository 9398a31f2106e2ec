"""Upstream's scripts/performance with the plugin on: a look-alike of them.

The scripts import one another by top-level names, which other people use as well.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
from wrapt import register_post_import_hook

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import overrides as performance
from bridge_cg_plugin.upstream.hooks.graph_fields import read_options
from bridge_cg_plugin.upstream.seams.activation import patch_module

from .lookalike import PARSER, write_lookalike

NAMES = ("argument_parser", "utils", "run_script", "run_recipe", "benchmark_parallelism", "recipe_metadata")
VISION = ["--vision_cuda_graph_impl", "transformer_engine", "--max-vision-cuda-graph-seq-length", "16384"]
PERMISSIVE = PARSER.replace('"local", "transformer_engine"]', '"local", "transformer_engine", "full_iteration"]')


def forget():
    for name in [n for n in sys.modules if n.split(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture
def scripts(bridge, monkeypatch):
    """Return a function that puts a folder first on the path, as running a script in it does."""
    forget()
    for name in performance.DEFINED:  # a hook is called for the first import of a process only
        register_post_import_hook(patch_module, name)
    yield lambda folder: monkeypatch.syspath_prepend(str(folder))
    bridge_cg_plugin.deactivate()
    forget()
    for patch in performance.PATCHES:
        patch.revert()


@pytest.fixture
def recipe(bridge, sft):
    return getattr(bridge, sft)()


def states():
    return {patch.name: patch.state for patch in performance.PATCHES if not patch.seam.packaged}


def launch(words, parse=None):
    """Do what upstream's run_script does with a command line: parse, Hydra words, then parsed flags."""
    parser = (parse or importlib.import_module("argument_parser").parse_cli_args)()
    args, cli_overrides = parser.parse_known_args(words)
    overrides = importlib.import_module("utils.overrides")
    return lambda recipe: overrides.set_user_overrides(overrides.set_cli_overrides(recipe, cli_overrides), args)


def test_a_launch_has_the_flags(scripts, tmp_path, recipe):
    scripts(write_lookalike(tmp_path / "scripts"))
    words = [*VISION, "--cuda_graph_impl", "none", "--max_steps", "5", "train.global_batch_size=8"]
    found = launch(words)(recipe)
    importlib.import_module("utils.utils")
    assert set(states().values()) == {"active"}
    vision = read_options(found).vision
    assert (vision.impl, vision.max_seq_length) == ("transformer_engine", 16384)
    assert found.rng.te_rng_tracker is True and found.model.use_te_rng_tracker is True
    assert (found.train.train_iters, found.train.global_batch_size) == (5, 8)


def test_a_parser_that_was_imported_before_pytorch_does_not_know_the_flags(scripts, tmp_path, recipe):
    """Upstream's bootstrap parses before anything imports PyTorch, which loads the plugin."""
    scripts(write_lookalike(tmp_path / "scripts"))
    bridge_cg_plugin.deactivate()
    parse = importlib.import_module("argument_parser").parse_cli_args
    bridge_cg_plugin.activate()
    words = ["--cuda_graph_impl", "transformer_engine", *VISION, "--cuda_graph_modules", "attn", "train.train_iters=5"]
    found = launch(words, parse)(recipe)
    options = read_options(found)
    assert options.vision.impl == options.language_model.impl == "transformer_engine"
    assert [module.name for module in options.language_model.modules] == ["attn"]
    assert found.train.train_iters == 5 and performance._words == {}


def test_words_and_flags_of_one_command_line_are_one_persons(scripts, tmp_path, recipe):
    scripts(write_lookalike(tmp_path / "scripts", argument_parser=PERMISSIVE))
    words = ["--cuda_graph_impl", "full_iteration", "model.cuda_graph_modules=[attn]"]
    if not hasattr(recipe.model, "cuda_graph_modules"):
        words[-1] = "model.cuda_graph_scope=[attn]"
    with pytest.raises(OptionError, match="cuda_graph_modules='attn'"):
        launch(words)(recipe)


def test_upstreams_function_keeps_the_tracker_for_vision_graphs_only(scripts, tmp_path, recipe):
    """Without the plugin's replacement, the trap: upstream's own switches the tracker off."""
    scripts(write_lookalike(tmp_path / "scripts"))
    overrides = importlib.import_module("utils.overrides")
    recipe.model.vision_cuda_graph_impl = "transformer_engine"
    overrides.set_workload_base_configs(recipe, SimpleNamespace(cuda_graph_impl="none"))
    assert recipe.rng.te_rng_tracker is True and recipe.model.use_te_rng_tracker is True
    bridge_cg_plugin.deactivate()
    overrides.set_workload_base_configs(recipe, SimpleNamespace(cuda_graph_impl="none"))
    assert recipe.rng.te_rng_tracker is False
    bridge_cg_plugin.activate()
    recipe.model.vision_cuda_graph_impl = "none"
    overrides.set_workload_base_configs(recipe, SimpleNamespace(cuda_graph_impl="none"))
    assert recipe.rng.te_rng_tracker is False and recipe.model.use_te_rng_tracker is False


def test_flags_of_library_recipes(scripts, tmp_path, recipe):
    """Upstream's --use_recipes goes through other functions, and its words through Bridge's."""
    from megatron.bridge.training.utils import omegaconf_utils

    scripts(write_lookalike(tmp_path / "scripts"))
    args, words = importlib.import_module("argument_parser").parse_cli_args().parse_known_args(VISION)
    utilities = importlib.import_module("utils.utils")
    assert read_options(utilities.apply_argparse_overrides(recipe, args)).vision.max_seq_length == 16384
    late = ["--vision_cuda_graph_slots", "2", "train.train_iters=5"]
    found = omegaconf_utils.process_config_with_overrides(recipe, cli_overrides=[*words, *late])
    assert read_options(found).vision.slots == 2 and found.train.train_iters == 5


@pytest.mark.parametrize("name", performance.DEFINED)
def test_another_module_of_the_name_is_left_alone(scripts, tmp_path, name, caplog):
    path = tmp_path / "mine" / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True)
    path.write_text("def parse_cli_args(): ...\ndef set_user_overrides(unrelated): ...\n")
    scripts(tmp_path / "mine")
    before = dict(vars(importlib.import_module(name)))
    bridge_cg_plugin.activate()
    assert {k: v for k, v in vars(sys.modules[name]).items() if k in ("parse_cli_args", "set_user_overrides")} == {
        k: v for k, v in before.items() if k in ("parse_cli_args", "set_user_overrides")
    }
    assert "active" not in states().values() and "broken" not in states().values() and caplog.text == ""


def test_switching_off_puts_everything_back(scripts, tmp_path):
    scripts(write_lookalike(tmp_path / "scripts"))
    bridge_cg_plugin.deactivate()
    modules = [importlib.import_module(name) for name in performance.DEFINED]
    before = [dict(vars(module)) for module in modules]
    bridge_cg_plugin.activate()
    assert set(states().values()) == {"active"}
    assert [dict(vars(module)) for module in modules] != before
    bridge_cg_plugin.deactivate()
    assert [dict(vars(module)) for module in modules] == before
