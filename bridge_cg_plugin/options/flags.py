"""Graph options as flags of any command line, in the spelling of Bridge's performance scripts. Needs argparse only."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .declaration import OptionError, refuse_gone
from .graph_options import GROUPS
from .language_model import MODULES, SCOPE

_OPTIONS = {one.field: one for group in GROUPS for one in group.options}
# Upstream's deprecated name is a flag, too.
_SCOPE = replace(_OPTIONS[MODULES], field=SCOPE, flags=(SCOPE,), help=f"deprecated: write --{MODULES}")
FLAGS = (*_OPTIONS.values(), _SCOPE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag, in both spellings, to a parser. A flag that was not given is None.

    Raises:
        argparse.ArgumentError: The parser has one of these flags already.
    """
    group = parser.add_argument_group("CUDA graphs", "With dashes in the place of underscores, too.")
    for flag in FLAGS:
        shown, *others = flag.spellings
        group.add_argument(shown, dest=flag.flags[0], metavar="VALUE", help=flag.help)
        if others:
            group.add_argument(*others, dest=flag.flags[0], help=argparse.SUPPRESS)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that parsed arguments set, as they were written."""
    given = {flag.field: getattr(arguments, flag.flags[0], None) for flag in FLAGS}
    return {field: value for field, value in given.items() if value is not None}


def take_flags(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line's flags set, and the tokens that are none of these flags.

    Raises:
        OptionError: A flag has no value, or its option has gone.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        arguments, rest = parser.parse_known_args(list(tokens))
    except argparse.ArgumentError as error:
        name = str(error.argument_name)
        raise OptionError.because(name, f"Cannot use {name}: {error.message}.") from None
    for token in rest:
        refuse_gone_flag(token)
    return given_flags(arguments), rest


def refuse_gone_flag(token: str) -> None:
    """Refuse a word of a command line that is the flag of an option that has gone.

    Raises:
        OptionError: It is.
    """
    name, _, value = token.partition("=")
    if name.startswith("--"):
        refuse_gone(name[2:].replace("-", "_"), value or name)


def clear_flags(arguments: argparse.Namespace, names: Iterable[str]) -> argparse.Namespace:
    """Return a copy of parsed arguments in which the named ones were not given."""
    return argparse.Namespace(**{**vars(arguments), **dict.fromkeys(names)})
