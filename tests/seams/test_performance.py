"""Upstream's scripts/performance with the plugin on: a look-alike always, a checkout if BRIDGE_CG_UPSTREAM names one.

The scripts import one another by top-level names, which other people use as well.
"""

import importlib
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from wrapt import register_post_import_hook

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import overrides as performance
from bridge_cg_plugin.upstream.hooks import recipes
from bridge_cg_plugin.upstream.hooks.graph_fields import read_options
from bridge_cg_plugin.upstream.seams.activation import patch_module

from .lookalike import PARSER, write_lookalike

CHECKOUT = os.environ.get("BRIDGE_CG_UPSTREAM", "")
NAMES = ("argument_parser", "utils", "run_script", "run_recipe", "benchmark_parallelism", "recipe_metadata")
VISION = ["--vision_cuda_graph_impl", "transformer_engine", "--max-vision-cuda-graph-seq-length", "16384"]
PERMISSIVE = PARSER.replace('"local", "transformer_engine"]', '"local", "transformer_engine", "full_iteration"]')
BENCHMARK = shlex.split(
    "--domain qwen3vl -m qwen_vl -mr qwen3_vl_30b_a3b --task pretrain -ng 16 -g h100 -c bf16 --max_steps 5"
)


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
    late = ["--vision_cuda_graph_tuning", "slots=2", "train.train_iters=5"]
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


@pytest.fixture
def checkout(scripts, monkeypatch):
    """A checkout of upstream's scripts/performance; NeMo-Run, which its parser asks for a folder, is stood in for."""
    if not CHECKOUT:
        pytest.skip("BRIDGE_CG_UPSTREAM names no checkout of Megatron-Bridge's repository")
    stand_in = ModuleType("nemo_run.config")
    stand_in.get_nemorun_home = lambda: "/nowhere"
    monkeypatch.setitem(sys.modules, "nemo_run", ModuleType("nemo_run"))
    monkeypatch.setitem(sys.modules, "nemo_run.config", stand_in)
    scripts(Path(CHECKOUT, "scripts/training"))
    scripts(Path(CHECKOUT, "scripts/performance"))


@pytest.mark.parametrize("early", [True, False], ids=["plugin_first", "parser_first"])
def test_a_checkout_launches_with_the_flags(checkout, tmp_path, early):
    if not early:
        bridge_cg_plugin.deactivate()
    run_script = importlib.import_module("run_script")
    bridge_cg_plugin.activate()
    words = [*BENCHMARK, *VISION, "--cuda_graph_impl", "none", "--save_config_filepath", str(tmp_path / "c.yaml")]
    args, rest = run_script.parse_cli_args().parse_known_args([*words, "train.global_batch_size=64"])
    assert hasattr(args, "vision_cuda_graph_impl") is early
    found = run_script._prepare_perf_recipe(args, rest)
    vision = read_options(found).vision
    assert (vision.impl, vision.max_seq_length) == ("transformer_engine", 16384)
    assert found.rng.te_rng_tracker is True and found.model.use_te_rng_tracker is True
    assert (found.train.train_iters, found.train.global_batch_size) == (5, 64)
    importlib.import_module("utils.utils")
    assert set(states().values()) == {"active"}


def test_steps_are_the_checkouts(checkout):
    metadata, runner = (importlib.import_module(name) for name in ("recipe_metadata", "recipe_runner"))
    assert dict(metadata.RECIPE_FORWARD_STEP_PREFIXES) == recipes.FAMILIES
    assert {k: v for k, v in runner.STEP_FUNCTIONS.items() if k != "gpt_step"} == recipes.STEPS
