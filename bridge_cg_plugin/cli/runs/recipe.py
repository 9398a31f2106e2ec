"""A recipe of Bridge or preset of the plugin, built and trained."""

import argparse
import contextlib
import gc
import importlib
import itertools
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin.options import GraphOptionWarning, OptionError
from bridge_cg_plugin.options.explain import in_words
from bridge_cg_plugin.options.flags import given_flags
from bridge_cg_plugin.recipes import with_graphs
from bridge_cg_plugin.recipes.graphs import mock_dataset
from bridge_cg_plugin.upstream.hooks.loops.steps import Mode


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


FIRST_PORT, PORTS = 20_000, 10_000
# Processes that ask at the same time, with neighbouring numbers, start as far apart.
CALLS_EACH = 97
_CALLS = itertools.count()


def free_port() -> int:
    """Return a port that nothing listens on, another one at each call.

    It is below those that the system gives to connections: such a one could be taken before the run listens on it.

    Raises:
        OSError: There is none.
    """
    for _ in range(PORTS):
        port = FIRST_PORT + (os.getpid() * CALLS_EACH + next(_CALLS)) % PORTS
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free")


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
        summary: The resolved options, in words.
    """

    config: Any
    mode: Mode
    step: str
    forward_step: Any
    summary: str


def prepare(parsed: argparse.Namespace, words: Sequence[str]) -> Prepared:
    """Build the recipe and apply everything to it.

    Raises:
        OptionError: There is no such recipe, field or step, or the options cannot work.
    """
    bridge_cg_plugin.activate()
    from bridge_cg_plugin.upstream.hooks.configuration.overrides import resolve
    from bridge_cg_plugin.upstream.hooks.configuration.recipes import build_recipe
    from bridge_cg_plugin.upstream.hooks.loops.steps import forward_step

    with quick_imports():
        recipe = build_recipe(parsed.recipe)
    config = with_presets(recipe, parsed)
    options = resolve(config, given_flags(parsed), words)
    mode, step = mode_and_step(parsed)
    return Prepared(config, mode, step, forward_step(step, mode), in_words(options))


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
    from bridge_cg_plugin.upstream.hooks.configuration.recipes import is_benchmark
    from bridge_cg_plugin.upstream.hooks.loops.steps import check_step, mode_of, step_name

    mode = parsed.mode or mode_of(parsed.recipe, is_benchmark(parsed.recipe))
    step = parsed.step_func or step_name(parsed.recipe)
    check_step(step)
    return mode, step


def train(run: Prepared, callbacks: Sequence[Any] = ()) -> None:
    """Train in this process, which torchrun or srun may have started as one of many, with Bridge training callbacks."""
    from bridge_cg_plugin.upstream.hooks.data.dataset_helper import helper_as_shipped
    from bridge_cg_plugin.upstream.hooks.loops.steps import train_function

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
