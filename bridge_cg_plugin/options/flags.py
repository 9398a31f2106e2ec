"""Graph options as flags of any command line, in the spelling of Bridge's performance scripts. Needs argparse only."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .declaration import Group, OptionError, refuse_gone
from .graph_options import GROUPS, TUNING, split_name, tuning_of
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
    """Return the flags of declared options, deprecated names after the new ones; one for a group's tuning values."""
    found = []
    for group in groups:
        for one in group.options:
            found += [Flag(one.flags[0], one.field, one.help, one.flags[1:])] if one.flags else []
            found += [Flag(SCOPE, SCOPE, f"deprecated: write --{MODULES}")] if one.field == MODULES else []
        if group.tuned:
            meaning = f"NAME=VALUE,... for tuning: {', '.join(one.name for one in group.tuned)}; see docs/options.md"
            found.append(Flag(group.tuning, group.tuning, meaning))
    return tuple(found)


FLAGS = flags_of(GROUPS)


def add_flags(parser: argparse.ArgumentParser, replace: bool = False) -> None:
    """Add every flag, in both spellings, to a parser. A flag that was not given is None.

    Args:
        parser: Any parser.
        replace: Whether a flag that the parser has already gives way.

    Raises:
        argparse.ArgumentError: The parser has one of these flags already, and `replace` is false.
    """
    before = parser.conflict_handler
    parser.conflict_handler = "resolve" if replace else before
    group = parser.add_argument_group("CUDA graphs")
    for flag in FLAGS:
        action = "append" if flag.field in TUNING else "store"
        group.add_argument(*flag.spellings, dest=flag.name, metavar="VALUE", help=flag.meaning, action=action)
    parser.conflict_handler = before


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that parsed arguments set, as they were written."""
    found: dict[str, Any] = {}
    for flag in FLAGS:
        value = getattr(arguments, flag.name, None)
        if value is not None:
            value = ",".join(value) if isinstance(value, list) else value  # of a mapping that was given in parts
            found[flag.field] = value
    return found


def take_flags(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line's flags set, and the tokens that are none of these flags.

    Words that set tuning values (`model.vision_cuda_graph_tuning.slots=2`) are among the flags: Hydra refuses keys that
    a mapping does not have yet. Those with an interpolation stay with Hydra.

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
    tuning = {token: word for token in rest if (word := _tuning_word(token))}
    found = given_flags(arguments)
    for field, value in tuning.values():
        found[field] = f"{found[field]},{value}" if field in TUNING and field in found else value
    return found, [token for token in rest if token not in tuning]


def _tuning_word(token: str) -> tuple[str, str] | None:
    """Return the field and the value of a word that sets tuning values; None for other tokens."""
    name, assigned, value = token.lstrip("+").partition("=")
    path, field = split_name(name)
    sets = assigned and "${" not in value and path in ([], ["model"]) and tuning_of(field)
    return (field, value) if sets else None


def clear_flags(arguments: argparse.Namespace, names: Iterable[str]) -> argparse.Namespace:
    """Return a copy of parsed arguments in which the named ones were not given."""
    return argparse.Namespace(**{**vars(arguments), **dict.fromkeys(names)})


def unknown_flag(token: str, known: Iterable[str]) -> OptionError:
    """Return the error for a token that looks like a flag and is none, with the nearest one.

    Raises:
        OptionError: The flag's option has gone.
    """
    name = token.partition("=")[0]
    refuse_gone(name.removeprefix("--").replace("-", "_"), name)
    near = difflib.get_close_matches(name.replace("-", "_"), [k.replace("-", "_") for k in known], n=1)
    return OptionError.unknown(name, "flag", f"--{near[0].lstrip('_')}" if near else "")


def as_typed(error: Exception, words: Sequence[str]) -> str:
    """Return an error's message, in which what a flag of a command line set is written as it was typed there.

    Args:
        error: What was raised.
        words: The command line.
    """
    message = str(error)
    flag = _typed(words).get(_flags_field(error.field)) if isinstance(error, OptionError) else None
    if not isinstance(error, OptionError) or flag is None:
        return message
    key = error.field.rpartition(".")[2] + "=" if _flags_field(error.field) in TUNING else ""
    found = re.match(rf"Cannot use {re.escape(error.field)}=('?)(?P<value>.*?)\1(?=: it must be )", message, re.DOTALL)
    if found is None:
        return message.replace(f"{error.field} must be", f"{flag} must be", 1)
    value = "" if found["value"] == "True" else f" {key}{found['value']}"
    return f"Cannot use {flag}{value}{message[found.end() :]}"


def _typed(words: Sequence[str]) -> dict[str, str]:
    """Return the flags that set fields, as they were typed, unless a later word sets the field."""
    fields = {spelling: flag.field for flag in FLAGS for spelling in flag.spellings}
    found: dict[str, str] = {}
    for word in words:
        name, assigned, _ = word.partition("=")
        if name.startswith("--"):
            found[fields.get(name, name[2:].replace("-", "_"))] = name
        elif assigned:
            found.pop(_flags_field(name.lstrip("+")), None)
    return found


def _flags_field(name: str) -> str:
    """Return the field that a flag sets in order to set a name of a configuration."""
    field = split_name(name)[1]
    return tuning_of(field) or field
