"""What an option is: declared once, as a dataclass field, from which flags, provider fields, docs and `explain` come.

A group of options is a frozen dataclass. `option` takes the default, the parser and the help of one of its fields, and
what else is known of it. Nothing else lists it: flags (`flags`), fields of model providers
(`upstream.hooks.graph_fields`), features that need seams (`upstream.seams.states`), the tables of docs/options.md and
`bridge-cg explain` (`explain`) read the group.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

_ENUM_REPR = re.compile(r"<[\w.]*?(\w+):[^<>]*>")
_CHANGE_IT = "Correct it."


class OptionError(ValueError):
    """An option has a value that cannot work. The message names the field, the value, what it must be, what to do."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"Cannot use {field}={value!r}: it must be {allowed}. {remedy}")
        self.field = field

    @classmethod
    def because(cls, field: str, message: str) -> Self:
        """Return the error of a field with a message of its own: what cannot be done, why, and what to do."""
        error = cls.__new__(cls)
        ValueError.__init__(error, message)
        error.field = field
        return error

    @classmethod
    def unknown(cls, name: str, what: str, nearest: str = "") -> Self:
        """Return the error of a name that does not exist.

        Args:
            name: What was written.
            what: What it could have been, in words.
            nearest: The name that is most like it; empty where none is.
        """
        advice = f"Did you mean {nearest}?" if nearest else "Correct or remove it."
        return cls.because(name, f"Cannot use {name!r}: there is no such {what}. {advice}")


class GraphOptionWarning(FutureWarning):
    """A deprecated spelling, an option without effect, or wrong gradients of upstream. Has what to write instead."""


class Parser(NamedTuple):
    """Returns the typed value of what was written in an option's field.

    Attributes:
        allowed: Which values there are, in words.
        parse: Takes the field's name and what was written; raises `OptionError` where there is no such value.
    """

    allowed: str
    parse: Callable[[str, Any], Any]


def is_unset(value: Any) -> bool:
    """Whether a value means that nothing was chosen: None, or YAML's spellings of it as text."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("null", "~"))


def word(value: Any) -> str:
    """Return the name that a value stands for: a string, an enum of any release, its text, or its saved YAML form."""
    if isinstance(value, Mapping):
        value = value.get("_name_", value)
    text = str(getattr(value, "name", value)).strip().strip("'\"")
    return _ENUM_REPR.sub(r"\1", text).rsplit(".", 1)[-1].lower()


def words(value: Any) -> tuple[str, ...]:
    """Return the distinct names of a list, however it was written; order is kept, empty entries are dropped."""
    if is_unset(value):
        return ()
    if isinstance(value, str):
        items: Any = re.split(r"[,\s]+", _ENUM_REPR.sub(r"\1", value).strip("[]() "))
    elif isinstance(value, AbstractSet):
        items = sorted(value, key=word)
    else:
        items = value if isinstance(value, Sequence) else [value]
    return tuple(dict.fromkeys(name for name in map(word, items) if name))


def parse_choice[Choice: str](field: str, value: Any, choices: Sequence[Choice], remedy: str = _CHANGE_IT) -> Choice:
    """Return one of `choices`.

    Raises:
        OptionError: It is none of them.
    """
    name = word(value)
    for choice in choices:
        if choice == name:
            return choice
    raise OptionError(field, value, " or ".join(choices), remedy)


def one_of(choices: Sequence[str], remedy: str = _CHANGE_IT) -> Parser:
    """Return a parser of `choices`."""
    return Parser(" or ".join(choices), lambda field, value: parse_choice(field, value, choices, remedy))


def some_of(choices: Sequence[str]) -> Parser:
    """Return a parser of lists of `choices`; "all" stands for all of them, "none" for an empty list."""
    allowed = f"{', '.join(choices)}, all, or none"

    def parse(field: str, value: Any) -> tuple[str, ...]:
        names = words(value)
        if names in (("all",), ("none",)):
            return tuple(choices) if names == ("all",) else ()
        return known_names(field, value, names, choices, allowed)

    return Parser(allowed, parse)


def known_names(
    field: str, value: Any, names: tuple[str, ...], choices: Sequence[str], allowed: str
) -> tuple[str, ...]:
    """Return the names that a value holds.

    Raises:
        OptionError: One is no choice.
    """
    for name in names:
        if name not in choices:
            raise OptionError(field, value, allowed, f"Remove {name!r}.")
    return names


def whole_number(minimum: int, alternative: str | None = None) -> Parser:
    """Return a parser of whole numbers of at least `minimum`, or the word `alternative`."""
    allowed = f"a whole number of at least {minimum}" + (f' or "{alternative}"' if alternative else "")

    def parse(field: str, value: Any) -> Any:
        if isinstance(value, str) and value == alternative:
            return alternative
        try:
            number = int(str(value))
        except ValueError:
            number = None
        if number is None or isinstance(value, bool) or number < minimum:
            raise OptionError(field, value, allowed, _CHANGE_IT)
        return number

    return Parser(allowed, parse)


def _parse_positive(field: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise OptionError(field, value, positive_number.allowed, _CHANGE_IT)
    return number


positive_number = Parser("a number above 0", _parse_positive)


def parse_flag(field: str, value: Any) -> bool:
    """Return a truth value written as true, false, 1 or 0.

    Raises:
        OptionError: It is none of these.
    """
    name = str(value).strip().lower()
    if name not in ("true", "false", "1", "0"):
        raise OptionError(field, value, "true or false", _CHANGE_IT)
    return name in ("true", "1")


flag = Parser("true or false", parse_flag)
_CAPACITIES = '"auto" or an ascending list of token counts'


def parse_capacities(field: str, value: Any) -> tuple[int, ...] | str:
    """Return bucket capacities, ascending, or "auto".

    Raises:
        OptionError: It is neither.
    """
    given = value
    if isinstance(value, str):
        if value.strip() == "auto":
            return "auto"
        value = [part for part in value.strip("[] ").split(",") if part.strip()]
    if not isinstance(value, Sequence) or not value:
        raise OptionError(field, given, _CAPACITIES, "Give at least one bucket.")
    try:
        sizes = tuple(int(str(item).strip()) for item in value)
    except ValueError:
        raise OptionError(field, given, _CAPACITIES, "Every entry must be a whole number.") from None
    if sizes[0] < 1:
        raise OptionError(field, given, _CAPACITIES, "Every entry must be at least 1.")
    if any(b >= c for b, c in pairwise(sizes)):
        raise OptionError(field, given, _CAPACITIES, "Sort the list and remove repeated entries.")
    return sizes


capacities = Parser(_CAPACITIES, parse_capacities)


# Of development snapshots before the first release.
SINCE = "0.1.0"
_SMALLEST = "Remove it: activations of 1 MiB and more are offloaded."
_CORES = "Set megatron-core's own field on the model: {}."
_FIELDS = "Its values are fields, such as {0}_slots; those that docs/options.md does not have are gone: remove them."
GONE = {
    "activation_offload": "Set vision_cuda_graph_offload, cuda_graph_packed_offload or offload_modules.",
    "activation_offload_min_bytes": _SMALLEST,
    "cuda_graph_packed_tuning": _FIELDS.format("cuda_graph_packed"),
    "offload": _CORES.format("offload_modules, with fine_grained_activation_offloading"),
    "offload_delay_until_cuda_graph": _CORES.format("delay_offload_until_cuda_graph"),
    "offload_delta_bytes_across_pp_ranks": _CORES.format("delta_offload_bytes_across_pp_ranks"),
    "offload_fraction": _CORES.format("activation_offload_fraction"),
    "offload_max_inflight": _CORES.format("fine_grained_offloading_max_inflight_offloads"),
    "offload_min_tensor_size": _CORES.format("min_offloaded_tensor_size"),
    "vision_cuda_graph_balance": "Remove it: images stay on their ranks.",
    "vision_cuda_graph_buckets_max_gb": "Set max_vision_cuda_graph_seq_length, which limits what a slot takes.",
    "vision_cuda_graph_check_interval": "Remove it: replays are compared with eager unless BRIDGE_CG_PROOF=0.",
    "vision_cuda_graph_modules": "Remove it: one graph holds the whole encoder, attention and MLPs.",
    "vision_cuda_graph_tuning": _FIELDS.format("vision_cuda_graph"),
}


def refuse_gone(field: str, value: Any) -> None:
    """Refuse a value of an option that has gone, or of a value inside it, such as `vision_cuda_graph_tuning.slots`.

    Raises:
        OptionError: The option has gone, and the value asks for it.
    """
    option = field.partition(".")[0]
    if option in GONE and not is_unset(value):
        why = f"Cannot use {field}={value!r}: the option has gone in bridge_cg_plugin {SINCE}."
        raise OptionError.because(field, f"{why} {GONE[option]}")


_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: The attribute of its group's dataclass.
        field: The field of a model's configuration.
        default: The value where nothing is chosen.
        parser: Returns the typed value of what was written.
        help: What it means, in a phrase.
        details: Further sentences in Markdown, for docs/options.md.
        flags: Names of its flag, with underscores and without dashes in front; the first is also the attribute of
            the parsed arguments.
        upstreams: Whether the field is upstream's; the plugin adds others to model providers.
    """

    name: str
    field: str
    default: Any
    parser: Parser
    help: str
    details: str = ""
    flags: tuple[str, ...] = ()
    upstreams: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling of its flag, with underscores and with dashes."""
        return tuple(dict.fromkeys(f"--{name}" for flag in self.flags for name in (flag, flag.replace("_", "-"))))

    @property
    def allowed(self) -> str:
        """Which values there are, in words."""
        return f"{self.parser.allowed}; None" if self.default is None else self.parser.allowed


def option(default: Any, parser: Parser, help: str, details: str = "", **further: Any) -> Any:
    """Declare an option as a field of a dataclass; for the arguments see `Option`.

    `field` and `flags` are given only where they are not named after the group.
    """
    return dataclasses.field(
        default=default, metadata={_KEY: {"parser": parser, "help": help, "details": details, **further}}
    )


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
        return tuple(self._option(f) for f in dataclasses.fields(self.kind) if _KEY in f.metadata)

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
        """All fields."""
        return tuple(one.field for one in self.options)

    @property
    def added(self) -> dict[str, Any]:
        """Field that the plugin adds to model providers -> default."""
        return {one.field: one.default for one in self.options if not one.upstreams}

    def read(self, source: Any) -> dict[str, Any]:
        """Return the typed values of the options that a mapping of fields, or an object that has them, gives.

        Raises:
            OptionError: A value cannot work.
        """
        get = source.get if isinstance(source, Mapping) else lambda name: getattr(source, name, None)
        given = {one: get(one.field) for one in self.options}
        return {one.name: one.parser.parse(one.field, value) for one, value in given.items() if not is_unset(value)}


def plain(value: Any) -> Any:
    """Return a value as configurations hold it: tuples as lists, enums by name."""
    return [plain(item) for item in value] if isinstance(value, tuple) else getattr(value, "name", value)
