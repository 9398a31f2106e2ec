"""What the command lines of the benchmarks share."""

import argparse
from collections.abc import Callable


def names_of(*names: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each of which must be one of these."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, not {name!r}")
        return found

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return int(text)

    return parse
