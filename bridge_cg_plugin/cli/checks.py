"""What keeps a run from starting: values that nothing trains with, and layouts or batches that do not fit its GPUs.

Imports neither torch nor Megatron.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.training_config import precisions, refused_schedule

# Layouts, each of which divides the GPUs: of all layers, of experts.
LAYOUTS = tuple(
    tuple(f"{kind}_parallel_size" for kind in kinds)
    for kinds in (
        ("tensor_model", "pipeline_model", "context"),
        ("expert_tensor", "expert_model", "pipeline_model"),
    )
)
FIELDS = tuple(dict.fromkeys(field for layout in LAYOUTS for field in layout))
# Sections that Bridge reads without asking whether they are there.
SECTIONS = ("checkpoint", "dataset", "ddp", "dist", "logger", "model", "optimizer", "scheduler", "train")
_LAYERS = ("model.num_layers", "model.hidden_size")
LEAST = {
    1: (
        *("dataset.seq_length", "model.seq_length", "train.micro_batch_size", "train.global_batch_size"),
        *("scheduler.lr_decay_iters", "scheduler.lr_decay_samples", "scheduler.lr_wsd_decay_iters"),
        *("model.ffn_hidden_size", "logger.log_interval", *(f"model.{field}" for field in FIELDS)),
    ),
    0: (
        *("train.train_iters", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples", *_LAYERS),
        *("optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.clip_grad"),
        *("validation.eval_iters", "validation.eval_interval", "checkpoint.save_interval"),
    ),
}
# Fields by which stages of a pipeline have different numbers of layers.
_UNEVEN = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("hybrid_layer_pattern", "hybrid_override_pattern"),
)
# A field on the command line, its value, what it must be, and what to do.
Unfit = tuple[str, Any, str, str]
_CHANGE = "Change either."


def other_gpu(measured: str, gpu: str | None) -> list[str]:
    """Return the GPU of graphs that is not the one of the records, as it is written, in a list."""
    return [] if gpu is None or gpu in measured.lower() else [f"--graphs {gpu}"]


def add_counts(parser: Any, nodes: str, default: int | None = None) -> None:
    """Add the flags that say how many GPUs there are.

    Args:
        parser: A parser or a group of one.
        nodes: What help says of machines.
        default: Of both.
    """
    for spellings, meaning in ((("--nodes",), nodes), (("--gpus_per_node", "--gpus-per-node"), "workers on each")):
        parser.add_argument(*spellings, type=_at_least_one, default=default, metavar="N", help=meaning)


def _at_least_one(text: str) -> int:
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


def check_start(recipe: str, config: Any, mode: str, gpus: int | None) -> None:
    """Refuse a run that Bridge would not start.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`.
        mode: "pretrain" or "finetune".
        gpus: How many GPUs there are; None where that is not known.

    Raises:
        OptionError: Fine-tuning has no checkpoint, a value is too low, or the layout or the batch does not fit.
    """
    check_sections(recipe, config)
    name, found = "checkpoint.pretrained_checkpoint", config.checkpoint.pretrained_checkpoint
    if found is not None and not _exists(found):
        raise OptionError(name, found, "a folder that exists", "Correct the path.")
    if found is None and mode == "finetune":
        folder = config.checkpoint.load  # recipes name one without having it
        absent = "" if folder is None else f", and there is no run to resume in checkpoint.load={folder}"
        if folder is None or not _exists(folder):
            raise OptionError.because(name, f"Cannot fine-tune without a checkpoint{absent}. Set {name}=PATH.")
    check_trainable(recipe, config, gpus, complete=True)


def _exists(folder: str) -> bool:
    return "://" in folder or Path(folder).exists()


def check_trainable(recipe: str, config: Any, gpus: int | None, complete: bool = False) -> None:
    """Refuse values that nothing trains with, a layout that does not divide its model or GPUs, and odd batches.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`.
        gpus: How many GPUs there are; None where that is not known.
        complete: Whether nothing will be set any more of what some recipes leave open.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    check_sections(recipe, config)
    _refuse(recipe, _values(config))
    if complete:
        _refuse(recipe, _left_open(config))
    if not has_gpus_of_parts(config.model):
        _refuse(recipe, _sizes(config.model))
        if gpus is not None:
            _check_layouts(config.model, gpus)
    if config.train.rampup_batch_size is None:
        _refuse(recipe, _batches(config, gpus))
    refuse_bridges(recipe, refused_schedule(config))


def check_sections(recipe: str, config: Any) -> None:
    """Refuse a configuration in which a word put a plain value, or nothing, in the place of a section.

    Raises:
        OptionError: Names the section.
    """
    for name in SECTIONS:
        section = getattr(config, name, config)
        if section is None or isinstance(section, int | float | str | list | dict):
            _refuse(recipe, [(name, section, "a section", f"Write {name}.FIELD=VALUE.")])


def refuse_bridges(recipe: str, why: str) -> None:
    """Refuse what Bridge refuses.

    Args:
        recipe: The recipe's name.
        why: Bridge's message; empty where it refuses nothing.

    Raises:
        OptionError: Has the message.
    """
    if why:
        raise OptionError.because("recipe", f"Cannot start {recipe}: Bridge refuses it. {' '.join(why.split())}")


def _refuse(recipe: str, found: Iterable[Unfit]) -> None:
    for field, value, allowed, remedy in found:
        why = f"{field} must be {allowed}, not {value!r}. {remedy}"
        raise OptionError.because(field, f"Cannot start {recipe}: {why}")


def _values(config: Any) -> Iterator[Unfit]:
    """Yield values that are too low or no name."""
    for least, names in LEAST.items():
        yield from _too_low(config, names, least)
    precision = getattr(config, "mixed_precision", None)
    if isinstance(precision, str) and precision.replace("-", "_") not in precisions():
        yield "mixed_precision", precision, f"one of {', '.join(precisions())}", "Correct it."


def _too_low(config: Any, names: Iterable[str], least: int) -> Iterator[Unfit]:
    for name in names:
        value = _value(config, name)
        if value is not None and value < least:
            yield name, value, f"at least {least}", "Correct it."


def _left_open(config: Any) -> Iterator[Unfit]:
    """Yield what keeps some of Bridge's recipes from training until a person sets it."""
    yield from _too_low(config, _LAYERS, 1)
    rate, lowest = _value(config, "optimizer.lr"), _value(config, "optimizer.min_lr")
    if None not in (rate, lowest) and lowest > rate:
        yield "optimizer.min_lr", lowest, f"at most optimizer.lr={rate}", _CHANGE


def _value(config: Any, name: str) -> Any:
    """Return a number of a section; None where there is none, or its value is not known."""
    section, _, field = name.partition(".")
    value = getattr(getattr(config, section, None), field, None)
    return value if isinstance(value, int | float) else None


def _sizes(model: Any) -> Iterator[Unfit]:
    """Yield sizes that leave a rank a part of an attention head or other layers than megatron-core's, or do not fit."""

    def whole(owner: Any, name: str) -> int:
        value = getattr(owner, name, None)
        return value if isinstance(value, int) else 0  # not known

    tensor, pipeline = (getattr(model, f"{kind}_model_parallel_size", None) or 1 for kind in ("tensor", "pipeline"))
    heads, layers, hidden = (whole(model, name) for name in ("num_attention_heads", "num_layers", "hidden_size"))
    if heads % tensor:
        allowed = f"a divisor of model.num_attention_heads={heads}"
        yield "model.tensor_model_parallel_size", tensor, allowed, _CHANGE
    if layers % pipeline and not any(getattr(model, name, None) for name in _UNEVEN):
        yield "model.pipeline_model_parallel_size", pipeline, f"a divisor of model.num_layers={layers}", _CHANGE
    if heads and hidden % heads and getattr(model, "kv_channels", None) is None:
        allowed = f"a multiple of model.num_attention_heads={heads}"
        yield "model.hidden_size", hidden, allowed, "Change either, or set model.kv_channels."
    out = whole(getattr(model, "vision_config", None), "out_hidden_size")
    if out and hidden and out != hidden:
        yield "model.hidden_size", hidden, f"model.vision_config.out_hidden_size={out}", _CHANGE


def _check_layouts(model: Any, gpus: int) -> None:
    """Refuse a layout that does not divide the GPUs.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    for fields in LAYOUTS:
        sizes = _sizes_of(model, fields)
        multiple = math.prod(sizes.values())
        if gpus % multiple:
            said = " and ".join(f"model.{field}={size}" for field, size in sizes.items())
            needs = f"{'need' if len(sizes) > 1 else 'needs'} a multiple of {multiple}"
            here = f"{gpus} GPUs" if gpus > 1 else "one GPU"
            raise OptionError.because("gpus", f"Cannot train on {here}: {said} {needs}. Change either.")


def _batches(config: Any, gpus: int | None) -> Iterator[Unfit]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    shares = 1 if gpus is None else replicas(config.model, gpus)
    if batch is None or micro is None or batch % (micro * shares) == 0:
        return
    shared = f" times {shares} data-parallel replicas" if shares > 1 else ""
    allowed = f"a multiple of train.micro_batch_size={micro}{shared}"
    yield "train.global_batch_size", batch, allowed, f"Write a multiple of {micro * shares}."
