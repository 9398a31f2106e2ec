"""A folder laid out as upstream's scripts/performance, with as little in it as the plugin touches."""

from pathlib import Path

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
FILES = {
    "argument_parser.py": PARSER,
    "utils/__init__.py": "",
    "utils/overrides.py": OVERRIDES,
    "run_script.py": "",
    "setup_experiment.py": "",
}


def write_lookalike(folder: Path, **replaced: str) -> Path:
    """Write the folder; `replaced` has other texts, by the name of a file without its suffix."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.stem, text))
    return folder
