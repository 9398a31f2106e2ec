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


def starts_elsewhere(parsed: argparse.Namespace) -> bool:
    """Return whether a command line's run starts on other machines than this one."""
    return bool(parsed.launcher == "slurm")


def check_start(config: Any, mode: Mode, gpus: int | None, elsewhere: bool = False) -> None:
    """Refuse a run that Bridge would not start.

    Args:
        config: A Bridge `ConfigContainer`.
        mode: "pretrain" or "finetune".
        gpus: How many GPUs there are; None where that is not known.
        elsewhere: Whether it starts on machines with folders of their own, where checkpoints may be.

    Raises:
        OptionError: Fine-tuning has no checkpoint, steps are below zero, or the layout or the batch does not fit the
            GPUs.
    """
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is not None:
        if not (elsewhere or _exists(checkpoint.pretrained_checkpoint)):
            found = checkpoint.pretrained_checkpoint
            raise OptionError("checkpoint.pretrained_checkpoint", found, "a folder that exists", "Correct the path.")
    elif mode == "finetune":
        _check_resumed(checkpoint.load, elsewhere)
    if (config.train.train_iters or 0) < 0:
        raise OptionError("train.train_iters", config.train.train_iters, "at least 0", "Correct it.")
    if gpus is not None:
        _check_layouts(config.model, gpus)
    if config.train.rampup_batch_size is None:
        _check_batch(config, gpus)


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


def _check_batch(config: Any, gpus: int | None) -> None:
    """Refuse a global batch that replicas cannot share in whole microbatches."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch is None or micro is None:
        return
    for name, size in {"train.global_batch_size": batch, "train.micro_batch_size": micro}.items():
        if size < 1:
            raise OptionError(name, size, "at least 1", "Raise it.")
    replicas = 1 if gpus is None or _has_gpus_of_parts(config.model) else gpus // _product(config.model, _LAYOUTS[0])
    if batch % (micro * replicas):
        shared = f" times {replicas} data-parallel replicas" if replicas > 1 else ""
        raise OptionError(
            "train.global_batch_size",
            batch,
            f"a multiple of train.micro_batch_size={micro}{shared}",
            f"Write a multiple of {micro * replicas}.",
        )


def _product(model: Any, fields: tuple[str, ...]) -> int:
    return math.prod(getattr(model, field, None) or 1 for field in fields)


def _has_gpus_of_parts(model: Any) -> bool:
    """Return whether parts of the model have GPUs of their own."""
    return bool(getattr(getattr(model, "dist_train", None), "use_dist_train", False))


def _check_layouts(model: Any, gpus: int) -> None:
    if _has_gpus_of_parts(model):
        return
    for fields in _LAYOUTS:
        sizes = {field: size for field in fields if (size := getattr(model, field, None) or 1) > 1}
        multiple = _product(model, fields)
        if gpus % multiple:
            said = " and ".join(f"model.{field}={size}" for field, size in sizes.items())
            needs = "need" if len(sizes) > 1 else "needs"
            here = f"{gpus} GPUs" if gpus > 1 else "one GPU"
            raise OptionError.because(
                "gpus", f"Cannot train on {here}: {said} {needs} a multiple of {multiple}. Change either."
            )
