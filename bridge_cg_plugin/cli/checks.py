"""What keeps a run from starting: no checkpoint, and layouts or batches that do not fit its GPUs.

Imports neither torch nor Megatron.
"""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import GraphOptions, OptionError
from bridge_cg_plugin.options.flags import FLAGS, refuse_gone_flag
from bridge_cg_plugin.options.sources import is_word
from bridge_cg_plugin.plugin import SWITCH
from bridge_cg_plugin.switches import switched_on
from bridge_cg_plugin.upstream.hooks.training_config import refused_start

# Layouts, each of which divides the GPUs: of all layers, of experts.
LAYOUTS = tuple(
    tuple(f"{kind}_parallel_size" for kind in kinds)
    for kinds in (("tensor_model", "pipeline_model", "context"), ("expert_tensor", "expert_model", "pipeline_model"))
)
FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS for field in layout))


def refuse_flags(words: Sequence[str], parsed: argparse.Namespace) -> None:
    """Refuse words that no parser took and that are flags.

    Raises:
        OptionError: Says that the option has gone, or names the nearest flag.
    """
    for word in (word for word in words if word.startswith("-")):
        refuse_gone_flag(word)
        name = word.partition("=")[0]
        known = [*(spelling for flag in FLAGS for spelling in flag.spellings), *(f"--{name}" for name in vars(parsed))]
        near = difflib.get_close_matches(name.replace("-", "_"), [flag.replace("-", "_") for flag in known], n=1)
        raise OptionError.unknown(name, "flag", f"--{near[0].lstrip('_')}" if near else "")


def recipe_in(flag: str | None, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe that a command line names, by its flag or among the words, and the other words.

    Raises:
        OptionError: Two are named.
    """
    names = [word for word in words if not is_word(word)]
    recipes = [name.lower() for name in (*([] if flag is None else [flag]), *names)]
    if len(recipes) > 1:
        said = f"{recipes[0]} is the recipe, and other words must be section.name=value"
        raise OptionError.because("recipe", f"Cannot use {recipes[1]!r}: {said}.")
    return next(iter(recipes), None), [word for word in words if word not in names]


def add_counts(parser: Any, nodes: str, default: int | None = None) -> None:
    """Add the flags that say how many GPUs there are.

    Args:
        parser: A parser or a group of one.
        nodes: What help says of machines.
        default: Of both.
    """
    for spellings, meaning in ((("--nodes",), nodes), (("--gpus_per_node", "--gpus-per-node"), "workers on each")):
        parser.add_argument(*spellings, type=at_least_one, default=default, metavar="N", help=meaning)


def at_least_one(text: str) -> int:
    """Return the number that a flag's value is; argparse names the flag that has none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def divided(model: Any, gpus: int) -> dict[str, int]:
    """Return the GPUs, over how many of them each field of the layout divides a model, and the replicas."""
    return {"gpus": gpus, **_sizes_of(model, FIELDS), "replicas": replicas(model, gpus)}


def layout_in_words(layout: Mapping[str, int]) -> str:
    """Return what `divided` found as a sentence."""
    fields = [f"model.{field}={size}" for field, size in layout.items() if field not in ("gpus", "replicas")]
    counts = ((layout["gpus"], "GPU"), (layout["replicas"], "data-parallel replica"))
    gpus, shares = (f"{number} {what}" + ("" if number == 1 else "s") for number, what in counts)
    return f"{gpus}: {', '.join([*fields, shares])}."


def _sizes_of(model: Any, fields: Iterable[str]) -> dict[str, int]:
    return {field: size for field in fields if (size := getattr(model, field, None) or 1) > 1}


def fewest_gpus(model: Any) -> int:
    """Return how many GPUs one replica of a model takes."""
    return math.prod(_sizes_of(model, LAYOUTS[0]).values())


def replicas(model: Any, gpus: int) -> int:
    """Return the data-parallel replicas of a model."""
    return 1 if has_gpus_of_parts(model) else gpus // fewest_gpus(model)


def has_gpus_of_parts(model: Any) -> bool:
    """Return whether parts of the model have GPUs of their own."""
    return bool(getattr(getattr(model, "dist_train", None), "use_dist_train", False))


def check_start(config: Any, mode: str, gpus: int | None, dry: bool = False) -> str:
    """Refuse a run that could not start.

    Args:
        config: A Bridge `ConfigContainer`.
        mode: "pretrain" or "finetune".
        gpus: How many GPUs there are; None where that is not known.
        dry: Whether nothing is trained, so that no checkpoint is needed.

    Returns:
        Which checkpoint training needs; empty where it has one or needs none.

    Raises:
        OptionError: Fine-tuning has no checkpoint, or the layout or the batch does not fit.
    """
    name, found, missing = "checkpoint.pretrained_checkpoint", config.checkpoint.pretrained_checkpoint, ""
    if found is not None and not _exists(found):
        raise OptionError(name, found, "a folder that exists", "Correct the path.")
    if found is None and mode == "finetune":
        folder = config.checkpoint.load  # recipes name one without having it
        absent = "" if folder is None else f", and there is no run to resume in checkpoint.load={folder}"
        if folder is None or not _exists(folder):
            missing = f"Cannot fine-tune without a checkpoint{absent}. Set {name}=PATH."
    if missing and not dry:
        raise OptionError.because(name, missing)
    check_fit(config, gpus)
    return missing


def check_bridge(
    recipe: str, config: Any, options: GraphOptions, gpus: int | None, ready: Callable[[Any], None] = lambda tried: None
) -> None:
    """Refuse what Bridge, or the plugin in it, refuses before it builds a model.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpus: How many GPUs there are; None takes one replica's.
        ready: Called with the copy of the configuration that is checked.

    Raises:
        OptionError: Training would end with this.
    """
    if (options.enabled or options.packed.enabled) and switched_on(SWITCH, True) is False:
        raise OptionError.because(SWITCH, f"Cannot run {recipe} on graphs: {SWITCH} switches the plugin off. Unset it.")
    if why := refused_start(config, gpus or fewest_gpus(config.model), ready):
        raise OptionError.because("recipe", f"Cannot start {recipe}: Bridge refuses it. {' '.join(why.split())}")


def _exists(folder: str) -> bool:
    return "://" in folder or Path(folder).exists()


def check_fit(config: Any, gpus: int | None) -> None:
    """Refuse a layout that does not divide the GPUs, and a batch that its replicas cannot share.

    Args:
        config: A Bridge `ConfigContainer`.
        gpus: How many GPUs there are; None where that is not known.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    whole = None if has_gpus_of_parts(config.model) else gpus
    for sizes in (_sizes_of(config.model, fields) for fields in LAYOUTS):
        multiple = math.prod(sizes.values())
        if whole is not None and whole % multiple:
            said = " and ".join(f"model.{field}={size}" for field, size in sizes.items())
            needs = f"{'need' if len(sizes) > 1 else 'needs'} a multiple of {multiple}"
            here = f"{whole} GPUs" if whole > 1 else "one GPU"
            raise OptionError.because("gpus", f"Cannot train on {here}: {said} {needs}. Change either.")
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    shares = 1 if gpus is None else replicas(config.model, gpus)
    if config.train.rampup_batch_size is not None or not (batch and micro) or batch % (micro * shares) == 0:
        return
    shared = f" times {shares} data-parallel replicas" if shares > 1 else ""
    allowed = f"a multiple of train.micro_batch_size={micro}{shared}"
    raise OptionError("train.global_batch_size", batch, allowed, f"Write a multiple of {micro * shares}.")
