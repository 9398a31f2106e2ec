"""A recipe of Bridge or preset of the plugin: read from a command line of `bridge-cg train`, built and trained."""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import random
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin.cli.checks import add_counts, recipe_in, refuse_flags
from bridge_cg_plugin.options import GraphOptions, GraphOptionWarning, OptionError, normalize
from bridge_cg_plugin.options.flags import add_flags, given_flags
from bridge_cg_plugin.recipes import GPUS, with_graphs
from bridge_cg_plugin.recipes.graphs import mock_dataset
from bridge_cg_plugin.upstream.hooks.recipes import Mode


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the command line of `bridge-cg train`.

    Args:
        description: What its help says before the flags.
    """
    parser = argparse.ArgumentParser(
        prog="bridge-cg train",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", metavar="NAME", help="a recipe's or preset's name, which may also stand alone")
    meaning = "graphs within the limits of this GPU, on any recipe of Bridge"
    run.add_argument("--graphs", type=str.lower, choices=tuple(GPUS), help=meaning)
    run.add_argument("--mock_data", "--mock-data", action="store_true", help="train on Bridge's mock images")
    run.add_argument("--mode", choices=("pretrain", "finetune"), help="how to train; by the name if left out")
    run.add_argument("--step_func", "--step-func", metavar="STEP", help="forward step; by the name if left out")
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print what the input resolves to and exit")
    run.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # of `bridge-cg compare`
    add_flags(parser)
    start = parser.add_argument_group("launch")
    meaning = "none: this process is the worker (alone, or under torchrun or srun); torchrun: start workers here"
    start.add_argument("--launcher", default="none", metavar="{none,torchrun}", help=meaning)
    add_counts(start, "machines, whose GPUs the layout and the batch must fit", default=1)
    return parser


def read(arguments: Sequence[str], description: str | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return parsed flags and the overrides after them.

    Args:
        arguments: The command line.
        description: What the help says before the flags.

    Raises:
        OptionError: A flag does not exist, its value alone cannot work, or there is no recipe. Nothing of upstream was
            imported.
    """
    parsed, words = build_parser(description).parse_known_args(arguments)
    refuse_flags(words, parsed)
    if parsed.launcher not in ("none", "torchrun"):
        raise OptionError("launcher", parsed.launcher, "none or torchrun", "Correct the name.")
    if parsed.launcher == "torchrun" and parsed.nodes != 1:
        raise OptionError("nodes", parsed.nodes, "1 with --launcher torchrun", "Start torchrun on every node.")
    parsed.recipe, words = recipe_in(parsed.recipe, words)
    if parsed.recipe is None:
        raise OptionError.because("recipe", "Name a recipe. `bridge-cg recipes` lists them.")
    normalize(given_flags(parsed))
    return parsed, words


def torchrun(gpus: int) -> list[str]:
    """Return what starts a script on so many GPUs of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Spare a `with` block garbage collections, and imports in it searches of all modules that there are by then.

    Pydantic makes such a search for each of wandb's classes: 5 s after Bridge, 1 s before it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.suppress(Exception):  # Bridge's import tells what is broken
            importlib.import_module("wandb")
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show inside a `with` block errors and the plugin's warnings only."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", GraphOptionWarning)
            yield
    finally:
        logging.disable(before)


def free_port() -> int:
    """Return a port that nothing listens on.

    It is below those that the system gives to connections: such a one could be taken before the run listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)  # whatever seed a script sets
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def error_in(text: str) -> str:
    """Return the error that a process's output ends with: the last line that begins with an exception's name."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
    line = re.sub(r"^\[rank\d+\]: ?", "", named[-1] if named else lines[0])
    return (f"out of memory: {line}" if "out of memory" in line.lower() else line)[:300]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: Bridge's configuration with everything applied.
        mode: "pretrain" or "finetune".
        step: Name of the forward step.
        forward_step: The forward step.
        options: The resolved graph options.
    """

    config: Any
    mode: Mode
    step: str
    forward_step: Any
    options: GraphOptions


def prepare(parsed: argparse.Namespace, words: Sequence[str]) -> Prepared:
    """Build the recipe and apply everything to it.

    Raises:
        OptionError: There is no such recipe, field or step, or the options cannot work.
    """
    bridge_cg_plugin.activate()
    from bridge_cg_plugin.upstream.hooks.overrides import resolve
    from bridge_cg_plugin.upstream.hooks.recipes import build_recipe, forward_step

    with quick_imports():
        recipe = build_recipe(parsed.recipe)
    config = with_presets(recipe, parsed)
    options = resolve(config, given_flags(parsed), words)
    mode, step = mode_and_step(parsed)
    return Prepared(config, mode, step, forward_step(step, mode), options)


def with_presets(config: Any, parsed: argparse.Namespace) -> Any:
    """Return a recipe's configuration with what `--graphs` and `--mock_data` set.

    Raises:
        OptionError: The recipe's model or data cannot be used so.
    """
    if parsed.graphs:
        return with_graphs(config, gpu=parsed.graphs, mock_data=parsed.mock_data)
    if parsed.mock_data:
        config.dataset = mock_dataset(config.dataset)
    return config


def mode_and_step(parsed: argparse.Namespace) -> tuple[Mode, str]:
    """Return how to train and the name of the forward step, by the command line or the recipe's name.

    Raises:
        OptionError: The name does not tell how to train, or there is no such step.
    """
    from bridge_cg_plugin.upstream.hooks.recipes import check_step, is_benchmark, mode_of, step_name

    mode = parsed.mode or mode_of(parsed.recipe, is_benchmark(parsed.recipe))
    step = parsed.step_func or step_name(parsed.recipe)
    check_step(step)
    return mode, step


def leave_nothing(config: Any) -> None:
    """Keep a configuration from resuming another run, and from writing checkpoints and event files.

    Runs that are compared start alike, from `checkpoint.pretrained_checkpoint` if the recipe wants one.
    """
    config.checkpoint.load = config.checkpoint.save = config.checkpoint.save_interval = None
    config.logger.tensorboard_dir = None


def train(run: Prepared, callbacks: Sequence[Any] = ()) -> None:
    """Train in this process, which torchrun or srun may have started as one of many, with Bridge training callbacks."""
    from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped, train_function

    # Bridge sets it to True, which takes the tokenizer's guard away: a forked data worker would wait for ever for
    # threads that only its parent has.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    further = {"callbacks": list(callbacks)} if callbacks else {}
    import torch

    starts_the_groups = not torch.distributed.is_initialized()
    with helper_as_shipped():
        train_function(run.mode)(config=run.config, forward_step_func=run.forward_step, **further)
    if starts_the_groups and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def require_gpu() -> None:
    """Refuse to train where Bridge would stop in the middle of its start.

    Raises:
        OptionError: PyTorch sees no GPU.
    """
    with quiet():
        import torch

        found = torch.cuda.is_available()
    if not found:
        raise OptionError.because("gpu", "PyTorch sees no NVIDIA GPU. Train where there is one, or add --dry-run.")
