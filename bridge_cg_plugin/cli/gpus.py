"""How many GPUs a run has, and whether the layout of its model fits them."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.recipes import GPUS

# Layouts, each of which divides the GPUs: of all layers, of experts.
LAYOUTS = tuple(
    tuple(f"{kind}_parallel_size" for kind in kinds)
    for kinds in (
        ("tensor_model", "pipeline_model", "context"),
        ("expert_tensor", "expert_model", "pipeline_model"),
    )
)
FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS for field in layout))


def add_gpu(parser: Any, meaning: str) -> None:
    """Add the flag that names a GPU.

    Args:
        parser: A parser or a group of one.
        meaning: What help says of it.
    """
    parser.add_argument("--gpu", choices=tuple(GPUS), help=meaning)


def other_gpu(measured: str, gpu: str | None) -> list[str]:
    """Return the flag of a GPU that is not the one of the records, in a list."""
    return [] if gpu is None or gpu in measured.lower() else [f"--gpu {gpu}"]


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
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def divided(model: Any, gpus: int) -> dict[str, int]:
    """Return the GPUs, over how many of them each field of the layout divides a model, and the replicas."""
    sizes = {field: size for field in FIELDS if (size := getattr(model, field, None) or 1) > 1}
    return {"gpus": gpus, **sizes, "replicas": replicas(model, gpus)}


def fewest_gpus(model: Any) -> int:
    """Return how many GPUs one replica of a model takes."""
    return _product(model, LAYOUTS[0])


def layout_in_words(layout: Mapping[str, int]) -> str:
    """Return what `divided` found as a sentence."""
    gpus, replicas = _counted(layout["gpus"], "GPU"), _counted(layout["replicas"], "data-parallel replica")
    fields = [f"model.{field}={size}" for field, size in layout.items() if field not in ("gpus", "replicas")]
    return f"{gpus}: {', '.join([*fields, replicas])}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def replicas(model: Any, gpus: int) -> int:
    """Return the data-parallel replicas of a model."""
    return 1 if has_gpus_of_parts(model) else gpus // fewest_gpus(model)


def _product(model: Any, fields: tuple[str, ...]) -> int:
    return math.prod(getattr(model, field, None) or 1 for field in fields)


def has_gpus_of_parts(model: Any) -> bool:
    """Return whether parts of the model have GPUs of their own."""
    return bool(getattr(getattr(model, "dist_train", None), "use_dist_train", False))


def check_layouts(model: Any, gpus: int) -> None:
    """Refuse a layout that does not divide the GPUs.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    if has_gpus_of_parts(model):
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
