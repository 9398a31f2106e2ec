"""What keeps a run from starting that Bridge or megatron-core finds out only while they start."""

import argparse
import os
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.gpus import fewest_gpus
from bridge_cg_plugin.cli.trainable import check_sections, check_trainable, refuse_bridges
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.configuration.bridge_checks import refused_start
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
