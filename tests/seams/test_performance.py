"""Upstream's scripts/performance with the plugin on: a look-alike of them.

The scripts import one another by top-level names, which other people use as well.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
from wrapt import register_post_import_hook

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.upstream.hooks import overrides as performance
from bridge_cg_plugin.upstream.seams.activation import patch_module

# A folder laid out as upstream's scripts/performance, with as little in it as the plugin touches.
PARSER = """
import argparse
VALID_CUDA_GRAPH_IMPLS = ["none", "local", "transformer_engine"]
VALID_CUDA_GRAPH_SCOPES = ["full_iteration", "attn", "mlp"]


def parse_cli_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda_graph_impl", choices=VALID_CUDA_GRAPH_IMPLS)
    parser.add_argument("--cuda_graph_scope", type=lambda text: text.split(","))
    parser.add_argument("--max_steps", type=int)
    return parser
"""
OVERRIDES = """
from megatron.bridge.training.utils import omegaconf_utils

calls = []


def _set_cuda_graph_overrides(recipe, cuda_graph_impl=None, cuda_graph_scope=None):
    calls.append((cuda_graph_impl, cuda_graph_scope))
    on = (cuda_graph_impl or recipe.model.cuda_graph_impl) != "none"
    recipe.rng.te_rng_tracker = recipe.model.use_te_rng_tracker = on
    return recipe


def set_workload_base_configs(cfg, settings):
    return _set_cuda_graph_overrides(cfg, cuda_graph_impl=settings.cuda_graph_impl)


def set_cli_overrides(recipe, cli_overrides):
    if not cli_overrides:
        return recipe
    return omegaconf_utils.process_config_with_overrides(recipe, cli_overrides=cli_overrides)


def set_user_overrides(recipe, args):
    recipe = _set_cuda_graph_overrides(recipe, args.cuda_graph_impl, args.cuda_graph_scope)
    if args.max_steps is not None:
        recipe.train.train_iters = args.max_steps
    return recipe
"""
FILES = {"argument_parser.py": PARSER, "utils/__init__.py": "", "utils/overrides.py": OVERRIDES}


def write_lookalike(folder, **replaced):
    """Write the folder; `replaced` has other texts, by the name of a file without its suffix."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.stem, text))
    return folder


MODULE = "utils.overrides"
NAMES = ("argument_parser", "utils")
VISION = ["--vision_cuda_graph_impl", "transformer_engine", "--max-vision-cuda-graph-seq-length", "16384"]
PERMISSIVE = PARSER.replace('"local", "transformer_engine"]', '"local", "transformer_engine", "full_iteration"]')


def forget():
    for name in [n for n in sys.modules if n.split(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture
def scripts(bridge, monkeypatch):
    """Return a function that puts a folder first on the path, as running a script in it does."""
    forget()
    register_post_import_hook(patch_module, MODULE)  # a hook is called for the first import of a process only
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


def launch(words):
    """Do what upstream's run_script does with a command line: parse, Hydra words, then parsed flags."""
    args, cli_overrides = importlib.import_module("argument_parser").parse_cli_args().parse_known_args(words)
    overrides = importlib.import_module("utils.overrides")
    return lambda recipe: overrides.set_user_overrides(overrides.set_cli_overrides(recipe, cli_overrides), args)


def test_flags_of_upstreams_parser_and_others_are_taken_together(scripts, tmp_path, recipe):
    scripts(write_lookalike(tmp_path / "scripts"))
    words = ["--cuda_graph_impl", "transformer_engine", *VISION, "--cuda_graph_modules", "attn"]
    found = launch([*words, "--max_steps", "5", "train.global_batch_size=8"])(recipe)
    options = normalize(found)[0]
    assert options.vision.max_seq_length == 16384
    assert options.vision.impl == options.language_model.impl == "transformer_engine"
    assert [module.name for module in options.language_model.modules] == ["attn"]
    assert (found.train.train_iters, found.train.global_batch_size) == (5, 8) and performance._words == {}


def test_words_and_flags_of_one_command_line_are_one_persons(scripts, tmp_path, recipe):
    scripts(write_lookalike(tmp_path / "scripts", argument_parser=PERMISSIVE))
    words = ["--cuda_graph_impl", "full_iteration", "model.cuda_graph_modules=[attn]"]
    if not hasattr(recipe.model, "cuda_graph_modules"):
        words[-1] = "model.cuda_graph_scope=[attn]"
    with pytest.raises(OptionError, match="cuda_graph_modules='attn'"):
        launch(words)(recipe)


@pytest.mark.parametrize(
    ("words", "impl"),
    [(VISION, "none"), ([], "transformer_engine"), ([], "none")],
    ids=["flags", "a preset", "without vision graphs"],
)
def test_vision_graphs_alone_keep_the_tracker_that_upstream_switches_off(scripts, tmp_path, recipe, words, impl):
    scripts(write_lookalike(tmp_path / "scripts"))
    recipe.model.vision_cuda_graph_impl = impl
    overrides = importlib.import_module("utils.overrides")
    overrides.set_workload_base_configs(recipe, SimpleNamespace(cuda_graph_impl="none"))
    assert recipe.rng.te_rng_tracker is False
    found = launch([*words, "--cuda_graph_impl", "none"])(recipe)
    kept = bool(words) or impl != "none"
    assert found.rng.te_rng_tracker is kept and found.model.use_te_rng_tracker is kept


def test_another_module_of_the_name_is_left_alone(scripts, tmp_path, caplog):
    path = tmp_path / "mine" / "utils" / "overrides.py"
    path.parent.mkdir(parents=True)
    path.write_text("def set_user_overrides(unrelated): ...\n")
    scripts(tmp_path / "mine")
    before = importlib.import_module(MODULE).set_user_overrides
    bridge_cg_plugin.activate()
    assert sys.modules[MODULE].set_user_overrides is before
    assert "active" not in states().values() and "broken" not in states().values() and caplog.text == ""


def test_switching_off_puts_everything_back(scripts, tmp_path):
    scripts(write_lookalike(tmp_path / "scripts"))
    bridge_cg_plugin.deactivate()
    module = importlib.import_module(MODULE)
    before = dict(vars(module))
    bridge_cg_plugin.activate()
    assert set(states().values()) == {"active"} and vars(module) != before
    bridge_cg_plugin.deactivate()
    assert vars(module) == before
