"""Graph options as flags of any command line, in the spelling of Bridge's performance scripts. Needs argparse only."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .declaration import Group, OptionError
from .graph_options import GROUPS
from .language_model import MODULES, SCOPE


class Flag(NamedTuple):
    """One flag.

    Attributes:
        name: Its name with underscores and without dashes in front; also the attribute of the parsed arguments.
        field: The field that it sets.
        meaning: Its meaning, for the help.
        aliases: Further names.
    """

    name: str
    field: str
    meaning: str
    aliases: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling, with underscores and with dashes."""
        names = (self.name, *self.aliases)
        return tuple(dict.fromkeys(f"--{name}" for n in names for name in (n, n.replace("_", "-"))))


def flags_of(groups: Iterable[Group]) -> tuple[Flag, ...]:
    """Return the flags of declared options, deprecated names after the new ones."""
    found = []
    for group in groups:
        for one in group.options:
            found.append(Flag(one.flags[0], one.field, one.help, one.flags[1:]))
            found += [Flag(SCOPE, SCOPE, f"deprecated: write --{MODULES}")] if one.field == MODULES else []
    return tuple(found)


FLAGS = flags_of(GROUPS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag, in both spellings, to a parser. A flag that was not given is None.

    Raises:
        argparse.ArgumentError: The parser has one of these flags already.
    """
    group = parser.add_argument_group("CUDA graphs")
    for flag in FLAGS:
        group.add_argument(*flag.spellings, dest=flag.name, metavar="VALUE", help=flag.meaning)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that parsed arguments set, as they were written."""
    given = {flag.field: getattr(arguments, flag.name, None) for flag in FLAGS}
    return {field: value for field, value in given.items() if value is not None}


def take_flags(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line's flags set, and the tokens that are none of these flags.

    Raises:
        OptionError: A flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        arguments, rest = parser.parse_known_args(list(tokens))
    except argparse.ArgumentError as error:
        name = str(error.argument_name)
        raise OptionError.because(name, f"Cannot use {name}: {error.message}.") from None
    return given_flags(arguments), rest


def clear_flags(arguments: argparse.Namespace, names: Iterable[str]) -> argparse.Namespace:
    """Return a copy of parsed arguments in which the named ones were not given."""
    return argparse.Namespace(**{**vars(arguments), **dict.fromkeys(names)})


def unknown_flag(token: str, known: Iterable[str]) -> OptionError:
    """Return the error for a token that looks like a flag and is none, with the nearest one."""
    name = token.partition("=")[0]
    near = difflib.get_close_matches(name.replace("-", "_"), [k.replace("-", "_") for k in known], n=1)
    return OptionError.unknown(name, "flag", f"--{near[0].lstrip('_')}" if near else "")
