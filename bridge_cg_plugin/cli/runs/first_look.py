"""What `bridge-cg explain` refuses of a command line of `bridge-cg train`, before anything heavy is imported.

    python -m bridge_cg_plugin.cli.runs.first_look --recipe NAME --dry-run

Its process has stand-ins for PyTorch and most of Megatron. The reason is on standard output, with exit status 2.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.explain.command import require_bridge, resolved, without_imports
from bridge_cg_plugin.cli.explain.recipes import check_hub
from bridge_cg_plugin.cli.gpus import fewest_gpus
from bridge_cg_plugin.cli.launch import check_sections, check_trainable, refuse_bridges
from bridge_cg_plugin.cli.runs.recipe import mode_and_step, with_presets
from bridge_cg_plugin.cli.runs.recipe_arguments import read
from bridge_cg_plugin.cli.runs.results import ROOT
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed, given_flags
from bridge_cg_plugin.upstream.hooks.configuration.training_config import refused_start
from bridge_cg_plugin.upstream.hooks.loops.steps import Mode

_WORLD = ("WORLD_SIZE", "SLURM_NTASKS")


def gpus_of(parsed: argparse.Namespace) -> int | None:
    """Return how many GPUs a command line or a launcher's environment names; None where nobody said."""
    if parsed.launcher != "none" or parsed.nodes * parsed.gpus_per_node > 1:
        return int(parsed.nodes * parsed.gpus_per_node)
    return next((int(os.environ[name]) for name in _WORLD if name in os.environ), None)


def starts_elsewhere(parsed: argparse.Namespace) -> bool:
    """Return whether a command line's run starts on other machines than this one."""
    return bool(parsed.launcher == "slurm")


def check_start(recipe: str, config: Any, mode: Mode, gpus: int | None, elsewhere: bool = False) -> None:
    """Refuse a run that Bridge would not start.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`.
        mode: "pretrain" or "finetune".
        gpus: How many GPUs there are; None where that is not known.
        elsewhere: Whether it starts on machines with folders of their own, where checkpoints may be.

    Raises:
        OptionError: Fine-tuning has no checkpoint, a value is too low, or the layout or the batch does not fit.
    """
    check_sections(recipe, config)
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is not None:
        if not (elsewhere or _exists(checkpoint.pretrained_checkpoint)):
            found = checkpoint.pretrained_checkpoint
            raise OptionError("checkpoint.pretrained_checkpoint", found, "a folder that exists", "Correct the path.")
    elif mode == "finetune":
        _check_resumed(checkpoint.load, elsewhere)
    check_trainable(recipe, config, gpus, complete=True)


def check_with_bridge(recipe: str, config: Any, gpus: int | None) -> None:
    """Refuse what Bridge's own checks refuse. Imports Bridge; the configuration stays as it is.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`.
        gpus: How many GPUs there are; None for as few as the layout takes.

    Raises:
        OptionError: Has Bridge's message.
    """
    refuse_bridges(recipe, refused_start(config, gpus or fewest_gpus(config.model)))


def _exists(folder: str) -> bool:
    return "://" in folder or Path(folder).exists()


def _check_resumed(folder: str | None, elsewhere: bool) -> None:
    """Refuse a folder of a run to resume that is not there; recipes name one without having it."""
    if folder is None or not (elsewhere or _exists(folder)):
        absent = "" if folder is None else f", and there is no run to resume in checkpoint.load={folder}"
        raise OptionError.because(
            "checkpoint.pretrained_checkpoint",
            f"Cannot fine-tune without a checkpoint{absent}. Set checkpoint.pretrained_checkpoint=PATH.",
        )


REFUSED = 2


def refusal(arguments: Sequence[str]) -> str:
    """Return what a command line is refused with, after about two seconds; empty where it is not, or not known yet.

    Args:
        arguments: The command line of `bridge-cg train`.
    """
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package())
    return done.stdout.strip() if done.returncode == REFUSED else ""


def with_package() -> dict[str, str]:
    """Return this process's environment, in which Python finds these packages also where they are not installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def check(arguments: Sequence[str]) -> None:
    """Refuse a command line with stand-ins for what Bridge imports. This process cannot train afterwards.

    Args:
        arguments: The command line of `bridge-cg train`.

    Raises:
        OptionError: The command line would be refused later too.
    """
    from bridge_cg_plugin.upstream.hooks.configuration.recipes import build_recipe

    parsed, words = read(arguments)
    require_bridge(parsed.recipe)
    asked = without_imports()
    try:
        config = with_presets(build_recipe(parsed.recipe), parsed)
    except OptionError as error:
        if error.__cause__ is not None:  # it may build with what Bridge imports
            return
        raise
    resolved(config, given_flags(parsed), words, asked is not None)
    mode, _ = mode_and_step(parsed)
    check_start(parsed.recipe, config, mode, gpus_of(parsed), starts_elsewhere(parsed))
    if parsed.dry_run:
        check_hub(parsed.recipe, asked or ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for input that is refused."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with contextlib.redirect_stdout(sys.stderr):
            check(given)
    except OptionError as error:
        print(as_typed(error, given))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
