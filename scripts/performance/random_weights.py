"""Train a recipe as `bridge-cg train` does, from the weights that it is initialized with, and write a JSON record."""

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.announce import rank
from bridge_cg_plugin.cli.runs.recipe import leave_nothing, prepare, read, train
from bridge_cg_plugin.cli.runs.recorder import Recorder
from bridge_cg_plugin.options.explain import in_words
from tests.models.tilings import compiled_side_by_side

# Where Bridge takes the loader of adapters' base weights from.
SETUP, LOADER = "megatron.bridge.training.setup", "_load_checkpoint_from_path"


def train_words(words: Sequence[str]) -> None:
    """Train once; rank 0 writes the record.

    Args:
        words: `--train MODE --out FILE`, and the command line of `bridge-cg train`.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args, rest = parser.parse_known_args(words)
    run = prepare(*read(rest))
    leave_nothing(run.config)
    print(f"{args.train}: {run.mode}() with {run.step}\n{in_words(run.options)}", flush=True)
    keep_initial_weights()
    recorder = Recorder()
    with compiled_side_by_side():  # one after the other they took 170 s of a Qwen3.5-VL 9B's first step
        train(run, [recorder])
    if rank() == 0:
        args.out.write_text(json.dumps(recorder.record()))


def keep_initial_weights() -> None:
    """Let adapters be trained on the weights that a model is initialized with: nothing is loaded in this process.

    Raises:
        RuntimeError: This release of Bridge loads them in another way.
    """
    setup: Any = importlib.import_module(SETUP)
    if not hasattr(setup, LOADER):
        raise RuntimeError(f"{SETUP} has no {LOADER}: base weights would be loaded in a way that is not known here")
    setattr(setup, LOADER, _load_nothing)


def _load_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for Bridge's loader."""
