"""What an option is: declared once, as a dataclass field, from which flags, provider fields, docs and `explain` come.

A group of options is a frozen dataclass. `option` takes the default, the parser and the help of one of its fields, and
what else is known of it. Nothing else lists it: flags (`flags`), fields of model providers
(`upstream.hooks.provider_fields`), what a release has (`releases`), features that need seams
(`upstream.seams.features`), the tables of docs/options.md and `bridge-cg explain` (`explain`) read the group.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .values import Parser, is_unset

_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: The attribute of its group's dataclass.
        field: The field of a model's configuration.
        default: The value where nothing is chosen.
        parse: Returns the typed value of what was written.
        value: What a flag takes, for its help.
        help: What it means, in a phrase.
        details: Further sentences in Markdown, for docs/options.md.
        flags: Names of its flag, with underscores and without dashes in front; none where empty.
        old: A deprecated name of the field with the help of its flag; the new field then is None where nothing is
            chosen.
        since: First release of megatron-bridge that has the field; the plugin adds the field where it is empty.
        feature: The `Feature` that the option asks for, with vision graphs on; empty for its group's.
        without: The values that do not ask for it; the first is named in messages.
    """

    name: str
    field: str
    default: Any
    parse: Parser
    value: str
    help: str
    details: str = ""
    flags: tuple[str, ...] = ()
    old: tuple[str, str] | None = None
    since: str = ""
    feature: str = ""
    without: tuple[Any, ...] = ()

    @property
    def allowed(self) -> str:
        """Which values there are, in words."""
        none = self.default is None or self.old is not None
        return f"{self.parse.allowed}; None" if none else self.parse.allowed


def option(default: Any, parse: Parser, value: str, help: str, details: str = "", **further: Any) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: See `Option`.
        parse: See `Option`.
        value: See `Option`.
        help: See `Option`.
        details: See `Option`.
        further: `field` and `flags` where they are not named after the group, and what else `Option` has.
    """
    said = {"parse": parse, "value": value, "help": help, "details": details, **further}
    return dataclasses.field(default=default, metadata={_KEY: said})


@dataclass(frozen=True, kw_only=True)
class Group:
    """Options that are read together.

    Attributes:
        name: The attribute of `GraphOptions`, and the mark of the table in docs/options.md.
        kind: The dataclass whose fields are the options.
        prefix: What fields begin with that are not named by themselves.
        owners: The models whose configuration has these fields, for messages.
    """

    name: str
    kind: type
    prefix: str = ""
    owners: str = "a GPT or Qwen3-VL model"

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The options, in the order of their declaration."""
        return tuple(self._option(f) for f in dataclasses.fields(self.kind))

    def _option(self, declared: dataclasses.Field[Any]) -> Option:
        said = dict(declared.metadata[_KEY])
        field = said.pop("field", f"{self.prefix}{declared.name}")
        flags = said.pop("flags", (field,))
        return Option(name=declared.name, field=field, default=declared.default, flags=flags, **said)

    @property
    def fields(self) -> dict[str, str]:
        """Option -> field of a model's configuration."""
        return {one.name: one.field for one in self.options}

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, deprecated names included."""
        return tuple(name for one in self.options for name in (one.field, *(one.old or ())[:1]))

    @property
    def added(self) -> dict[str, Any]:
        """Field that the plugin adds to model providers -> default."""
        found: dict[str, Any] = {}
        for one in self.options:
            if not one.since:
                found |= {one.old[0]: one.default, one.field: None} if one.old else {one.field: one.default}
        return found

    def read(self, source: Any) -> dict[str, Any]:
        """Return the typed values of the options that a mapping of fields, or an object that has them, gives.

        Raises:
            OptionError: A value cannot work.
        """
        get = getter(source)
        given = {one: get(one.field) for one in self.options}
        return {one.name: one.parse(one.field, value) for one, value in given.items() if not is_unset(value)}


def getter(source: Any) -> Callable[[str], Any]:
    """Return a function that returns a field of a mapping or an object; None where it is absent."""
    return source.get if isinstance(source, Mapping) else lambda name: getattr(source, name, None)


def plain(value: Any) -> Any:
    """Return a value as configurations hold it: tuples as lists."""
    return list(value) if isinstance(value, tuple) else value
