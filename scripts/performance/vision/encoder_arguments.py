"""What the command lines of the encoders' benchmarks share: which encoders, how deep, and where records go."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bridge_cg_plugin.cli.runs.results import output_path
from scripts.performance.models.encoder_case import Encoder
from scripts.performance.models.encoders import ENCODERS
from scripts.performance.vision.encoders import MODES

WAYS = ", ".join(MODES)
NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


def encoder_parser(description: str, records: str) -> argparse.ArgumentParser:
    """Return a parser of the shared arguments; `records` is the file's name in docs/benchmarks."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--encoders", default=",".join(ENCODERS), help=f"comma-separated; all: {', '.join(ENCODERS)}")
    parser.add_argument("--layers", type=int, help="of every encoder; the full size if left out")
    parser.add_argument("--out", type=Path, help=f"file of records; docs/benchmarks/{records} on a GPU")
    return parser


def layers_of_encoders(args: argparse.Namespace, records: str, least: Mapping[str, int] = NO_NUMBERS) -> dict[str, int]:
    """Check a command line, set where its records go, and return how many layers each of its encoders has.

    Args:
        args: What `encoder_parser` and the command's own arguments made.
        records: The file's name in docs/benchmarks.
        least: The smallest value of the command's own arguments, by name.

    Raises:
        ValueError: An encoder is unknown, a number too small, or the file cannot be written.
    """
    names = [name.strip() for name in args.encoders.split(",")]
    for name in names:
        if name not in ENCODERS:
            raise ValueError(
                f"Cannot use --encoders {name}: it must be any of {', '.join(ENCODERS)}. Correct the name."
            )
    for flag, smallest in {"layers": 2, **least}.items():
        value = getattr(args, flag)
        if value is not None and value < smallest:
            raise ValueError(f"Cannot use --{flag} {value}: it must be a whole number from {smallest} on. Correct it.")
    args.out = output_path(args.out, records)
    return {name: args.layers or ENCODERS[name].layers for name in names}


def modes_of(words: str) -> list[str]:
    """Return the plugin's modes that a command line names.

    Raises:
        ValueError: There is no such mode.
    """
    modes = [mode.strip() for mode in words.split(",")]
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"Cannot use --modes {mode}: it must be any of {WAYS}. Correct the name.")
    return modes


def with_cases(names: Iterable[str], words: str | None) -> dict[str, Encoder]:
    """Return encoders by name with the cases that a command line names, None for all; not every encoder has each.

    Raises:
        ValueError: None of the encoders has a case.
    """
    encoders = {name: ENCODERS[name] for name in names}
    if words is None:
        return encoders
    cases = [case.strip() for case in words.split(",")]
    there = [case for encoder in encoders.values() for case in encoder.sizes]
    for case in cases:
        if case not in there:
            raise ValueError(
                f"Cannot use --cases {case}: it must be any of {', '.join(dict.fromkeys(there))}. Correct the name."
            )
    return {
        name: replace(encoder, sizes={case: size for case, size in encoder.sizes.items() if case in cases})
        for name, encoder in encoders.items()
    }
