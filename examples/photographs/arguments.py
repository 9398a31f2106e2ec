"""The command line of the main job and of each of its runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from examples.photographs.layout import Layout

DESCRIPTION = "Train on photographs eager and with vision graphs and compare."
LAYOUT = {
    "data": "GPUs that hold the same weights and train on other samples",
    "tensor": "GPUs that share every layer, with sequence parallelism in the language model",
    "pipeline": "pipeline stages; the first has the vision encoder and 3 layers of the language model",
    "context": "GPUs that share every sequence",
}


def name_and_value(word: str) -> tuple[str, Any]:
    """Return the field that a word sets, name=value, and the value as YAML reads it.

    Raises:
        argparse.ArgumentTypeError: It has another form, or its value is no YAML.
    """
    name, equals, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"must be name=value in YAML, not {word!r}: quotes may be missing") from error
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be name=value, not {word!r}")
    return name, value


def override(word: str) -> str:
    """Return a word that sets a field as it is, for the command line of a run.

    Raises:
        argparse.ArgumentTypeError: See `name_and_value`.
    """
    name_and_value(word)
    return word


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a command line, this process's where none is given."""
    parser = argparse.ArgumentParser(prog="python -m examples.photographs", description=DESCRIPTION)
    parser.add_argument("--steps", type=int, help="optimizer steps (50 on a GPU, 8 without)")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--single", action="store_true", help="every sample is one 448 x 448 image")
    images.add_argument("--large", action="store_true", help="every sample is one 1344 x 1344 image")
    parser.add_argument("--language-model", help="LAYERSxWIDTH, 4x2048 without it; widths are 1024, 2048 and 2560")
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers and few image sizes, for tests")
    parser.add_argument("--validate-every", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--text-only-every", type=int, default=0, help="every how many samples one has no image")
    parser.add_argument("--no-overlap", action="store_true", help="no overlap of communication and compute")
    parser.add_argument("--save", help="checkpoint folder to write")
    parser.add_argument("--load", help="checkpoint folder to resume from")
    for name, what in LAYOUT.items():
        parser.add_argument(f"--{name}-parallel", type=int, default=1, metavar="N", help=what)
    parser.add_argument(
        "--pipeline-chunks",
        type=int,
        default=1,
        metavar="N",
        help="model chunks of each stage; more than one is an interleaved schedule",
    )
    parser.add_argument("--global-batch", type=int, help="samples of an optimizer step, 4 without it")
    parser.add_argument(
        "--loader-workers", type=int, help="processes that load data of each GPU, 4 without it, none with --small"
    )
    parser.add_argument("--eager-runs", type=int, default=3, help="eager runs that make the spread, at least 2")
    parser.add_argument(
        "--train",
        choices=("eager", "graphs", "upstream"),
        help="train once in this process, without comparison; upstream is its own vision graphs, without the plugin",
    )
    parser.add_argument("--out", type=Path, help="with --train: where to write the run's figures")
    parser.add_argument(
        "--distinct", type=int, default=0, metavar="N", help="with --train: samples begin again after so many; 0: never"
    )
    parser.add_argument("overrides", nargs="*", type=override, help="fields of the model provider, as name=value")
    return parser.parse_intermixed_args(words)


def layout_of(args: argparse.Namespace) -> Layout:
    """Return the layout over GPUs that a command line says.

    Raises:
        ValueError: A size below 1, or several chunks without a pipeline.
    """
    return Layout(chunks=args.pipeline_chunks, **{name: getattr(args, f"{name}_parallel") for name in LAYOUT})


def layout_in(words: Sequence[str]) -> Layout:
    """Return the layout over GPUs that the words of a run's command line say."""
    return layout_of(parse(words))


def training_arguments(args: argparse.Namespace, steps: int) -> list[str]:
    """Return the command line of each single run."""
    arguments = ["--steps", str(steps), *layout_of(args).words(), *args.overrides]
    for name in ("single", "large", "small", "no_overlap"):
        if getattr(args, name):
            arguments.append("--" + name.replace("_", "-"))
    for name in ("validate_every", "text_only_every", "save", "load", "language_model", "global_batch"):
        if getattr(args, name):
            arguments += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    if args.loader_workers is not None:
        arguments += ["--loader-workers", str(args.loader_workers)]
    return arguments
