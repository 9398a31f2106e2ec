"""What keeps a run from starting that Bridge or megatron-core finds out only while they start."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.steps import Mode

_WORLD = ("WORLD_SIZE", "SLURM_NTASKS")
# Layouts, each of which divides the GPUs: of all layers, of experts.
_LAYOUTS = tuple(
    tuple(f"{kind}_parallel_size" for kind in kinds)
    for kinds in (
        ("tensor_model", "pipeline_model", "context"),
        ("expert_tensor", "expert_model", "pipeline_model"),
    )
)


def gpus_of(parsed: argparse.Namespace) -> int | None:
    """Return how many GPUs a command line or a launcher's environment names; None where nobody said."""
    if parsed.launcher != "none" or parsed.nodes * parsed.gpus_per_node > 1:
        return int(parsed.nodes * parsed.gpus_per_node)
    return next((int(os.environ[name]) for name in _WORLD if name in os.environ), None)


def check_start(config: Any, mode: Mode, gpus: int | None) -> None:
    """Refuse a run that Bridge would not start.

    Args:
        config: A Bridge `ConfigContainer`.
        mode: "pretrain" or "finetune".
        gpus: How many GPUs there are; None where that is not known.

    Raises:
        OptionError: Fine-tuning has no checkpoint, steps are below zero, or the layout does not fit the GPUs.
    """
    if mode == "finetune" and config.checkpoint.pretrained_checkpoint is None:
        _check_resumed(config.checkpoint.load)
    if (config.train.train_iters or 0) < 0:
        raise OptionError("train.train_iters", config.train.train_iters, "at least 0", "Correct it.")
    if gpus is not None:
        _check_layouts(config.model, gpus)


def _check_resumed(folder: str | None) -> None:
    """Refuse a folder of a run to resume that is not there; recipes name one without having it."""
    if folder is None or not ("://" in folder or Path(folder).exists()):
        absent = "" if folder is None else f", and there is no run to resume in checkpoint.load={folder}"
        raise OptionError.because(
            "checkpoint.pretrained_checkpoint",
            f"Cannot fine-tune without a checkpoint{absent}. Set checkpoint.pretrained_checkpoint=PATH.",
        )


def _check_layouts(model: Any, gpus: int) -> None:
    if getattr(getattr(model, "dist_train", None), "use_dist_train", False):
        return  # parts of the model have GPUs of their own
    for fields in _LAYOUTS:
        sizes = {field: size for field in fields if (size := getattr(model, field, None) or 1) > 1}
        multiple = math.prod(sizes.values())
        if gpus % multiple:
            said = " and ".join(f"model.{field}={size}" for field, size in sizes.items())
            needs = "need" if len(sizes) > 1 else "needs"
            raise OptionError.because(
                "gpus", f"Cannot train on {gpus} GPUs: {said} {needs} a multiple of {multiple}. Change either."
            )
