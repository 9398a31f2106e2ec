"""How many GPUs a run has, and whether the layout of its model and its batch fit them."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from bridge_cg_plugin.options import OptionError

# Layouts, each of which divides the GPUs: of all layers, of experts.
LAYOUTS = tuple(
    tuple(f"{kind}_parallel_size" for kind in kinds)
    for kinds in (
        ("tensor_model", "pipeline_model", "context"),
        ("expert_tensor", "expert_model", "pipeline_model"),
    )
)
_FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS for field in layout))
# Fields by which stages of a pipeline have different numbers of layers.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)


def add_counts(parser: Any, nodes: str, default: int | None = None) -> None:
    """Add the flags that say how many GPUs there are.

    Args:
        parser: A parser or a group of one.
        nodes: What help says of machines.
        default: Of both.
    """
    parser.add_argument("--nodes", type=_at_least_one, default=default, metavar="N", help=nodes)
    parser.add_argument(
        "--gpus_per_node",
        "--gpus-per-node",
        type=_at_least_one,
        default=default,
        metavar="N",
        help="workers on each",
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a whole number of at least 1")
    return int(text)


def check_gpus(config: Any, gpus: int | None) -> None:
    """Refuse values below what trains, a layout that does not divide its model or GPUs, and batches it cannot share.

    Args:
        config: A Bridge `ConfigContainer`.
        gpus: How many GPUs there are; None where that is not known.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    _check_values(config)
    if not _has_gpus_of_parts(config.model):
        _check_model(config.model)
    if gpus is not None:
        _check_layouts(config.model, gpus)
    if config.train.rampup_batch_size is None:
        _check_batch(config, gpus)


def _check_values(config: Any) -> None:
    rate = getattr(getattr(config, "optimizer", None), "lr", None)
    _check_least({f"model.{field}": getattr(config.model, field, None) for field in _FIELDS}, 1, "Correct it.")
    _check_least({"train.train_iters": config.train.train_iters, "optimizer.lr": rate}, 0, "Correct it.")


def _check_least(values: Mapping[str, Any], least: int, remedy: str) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and value < least:
            raise OptionError(name, value, f"at least {least}", remedy)


def _check_model(model: Any) -> None:
    """Refuse ranks that would have a part of an attention head, or other layers than megatron-core gives them."""
    tensor, pipeline = (getattr(model, f"{kind}_model_parallel_size", None) or 1 for kind in ("tensor", "pipeline"))
    heads, layers = (getattr(model, name, None) for name in ("num_attention_heads", "num_layers"))
    if isinstance(heads, int) and heads % tensor:
        allowed = f"a divisor of model.num_attention_heads={heads}"
        raise OptionError("model.tensor_model_parallel_size", tensor, allowed, "Change either.")
    uneven = any(getattr(model, name, None) for name in _UNEVEN)
    if isinstance(layers, int) and layers % pipeline and not uneven:
        allowed = f"a divisor of model.num_layers={layers}"
        raise OptionError("model.pipeline_model_parallel_size", pipeline, allowed, "Change either.")


def divided(model: Any, gpus: int) -> dict[str, int]:
    """Return the GPUs, over how many of them each field of the layout divides a model, and the replicas."""
    sizes = {field: size for field in _FIELDS if (size := getattr(model, field, None) or 1) > 1}
    return {"gpus": gpus, **sizes, "replicas": _replicas(model, gpus)}


def layout_in_words(layout: Mapping[str, int]) -> str:
    """Return what `divided` found as a sentence."""
    gpus, replicas = _counted(layout["gpus"], "GPU"), _counted(layout["replicas"], "data-parallel replica")
    fields = [f"model.{field}={size}" for field, size in layout.items() if field not in ("gpus", "replicas")]
    return f"{gpus}: {', '.join([*fields, replicas])}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _replicas(model: Any, gpus: int) -> int:
    return 1 if _has_gpus_of_parts(model) else gpus // _product(model, LAYOUTS[0])


def _check_batch(config: Any, gpus: int | None) -> None:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    if batch is None or micro is None:
        return
    _check_least({"train.global_batch_size": batch, "train.micro_batch_size": micro}, 1, "Raise it.")
    replicas = 1 if gpus is None else _replicas(config.model, gpus)
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
    for fields in LAYOUTS:
        sizes = {field: size for field in fields if (size := getattr(model, field, None) or 1) > 1}
        multiple = _product(model, fields)
        if gpus % multiple:
            said = " and ".join(f"model.{field}={size}" for field, size in sizes.items())
            needs = "need" if len(sizes) > 1 else "needs"
            here = f"{gpus} GPUs" if gpus > 1 else "one GPU"
            raise OptionError.because(
                "gpus", f"Cannot train on {here}: {said} {needs} a multiple of {multiple}. Change either."
            )
