"""What an option is: declared once, as a dataclass field, from which flags, provider fields, docs and `explain` come.

A group of options is a frozen dataclass. `option` takes the default, the parser and the help of one of its fields, and
what else is known of it. Nothing else lists it: flags (`flags`), fields of model providers
(`upstream.hooks.graph_fields`), features that need seams (`upstream.seams.states`), the tables of docs/options.md and
`bridge-cg explain` (`explain`) read the group.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

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


@dataclass(frozen=True, slots=True)
class Parser:
    """Returns the typed value of what was written in an option's field.

    Attributes:
        allowed: Which values there are, in words.
        parse: Takes the field's name and what was written; raises `OptionError`.
    """

    allowed: str
    parse: Callable[[str, Any], Any]

    def __call__(self, field: str, value: Any) -> Any:
        """Return the typed value.

        Raises:
            OptionError: There is no such value.
        """
        return self.parse(field, value)


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
    if any(b >= c for b, c in pairwise(sizes)):
        raise OptionError(field, given, _CAPACITIES, "Sort the list and remove repeated entries.")
    return sizes


capacities = Parser(_CAPACITIES, parse_capacities)


# Of development snapshots before the first release.
SINCE = "0.1.0"
_HOST = "Remove it: offloading takes at most four fifths of the host's memory, shared by its processes."
_LIMITS = "Remove it: a bucket is captured for the limits that microbatches ask for."
_MODE = "Remove it: automatic buckets are captured on demand, named ones at once."
_EVALUATION = "Remove it: evaluation is captured when it first runs."
_SMALLEST = "Remove it: activations of 1 MiB and more are offloaded."
_CORES = "Set megatron-core's own field on the model: {}."
GONE = {
    "activation_offload": "Set vision_cuda_graph_offload, cuda_graph_packed_offload or offload_modules.",
    "activation_offload_min_bytes": _SMALLEST,
    "cuda_graph_packed_tuning.bucket_limits": _LIMITS,
    "cuda_graph_packed_tuning.capture_mode": _MODE,
    "cuda_graph_packed_tuning.evaluation": _EVALUATION,
    "cuda_graph_packed_tuning.max_seqlen": "Remove it: a document may be as long as its bucket.",
    "cuda_graph_packed_tuning.offload_host_max_gb": _HOST,
    "cuda_graph_packed_tuning.offload_min_bytes": _SMALLEST,
    "cuda_graph_packed_tuning.planned_for": "Remove it: buckets that ranks cannot share are refused in any case.",
    "offload": _CORES.format("offload_modules, with fine_grained_activation_offloading"),
    "offload_delay_until_cuda_graph": _CORES.format("delay_offload_until_cuda_graph"),
    "offload_delta_bytes_across_pp_ranks": _CORES.format("delta_offload_bytes_across_pp_ranks"),
    "offload_fraction": _CORES.format("activation_offload_fraction"),
    "offload_max_inflight": _CORES.format("fine_grained_offloading_max_inflight_offloads"),
    "offload_min_tensor_size": _CORES.format("min_offloaded_tensor_size"),
    "vision_cuda_graph_buckets_max_gb": "Set max_vision_cuda_graph_seq_length, which limits what a slot takes.",
    "vision_cuda_graph_balance": "Remove it: images stay on their ranks.",
    "vision_cuda_graph_check_interval": "Remove it: with BRIDGE_CG_PROOF=1 replays are compared with eager.",
    "vision_cuda_graph_modules": "Remove it: one graph holds the whole encoder, attention and MLPs.",
    "vision_cuda_graph_tuning.audio": "Remove it: the audio encoder is captured with the vision encoder.",
    "vision_cuda_graph_tuning.bucket_limits": _LIMITS,
    "vision_cuda_graph_tuning.capture_mode": _MODE,
    "vision_cuda_graph_tuning.check_action": "Remove warn; for stop, set vision_cuda_graph_strict.",
    "vision_cuda_graph_tuning.check_tolerance": "Remove it: the plugin chooses by the encoder.",
    "vision_cuda_graph_tuning.cost_fallback": "Remove it: where eager is faster, name buckets near the images' sizes.",
    "vision_cuda_graph_tuning.drop_unused_steps": "Remove it, or give vision_cuda_graph_buckets fewer buckets.",
    "vision_cuda_graph_tuning.evaluation": _EVALUATION,
    "vision_cuda_graph_tuning.frozen_outputs_gb": "Remove it: a frozen encoder's replays take as long as ever.",
    "vision_cuda_graph_tuning.gradient_accumulation_fusion": "Remove it: weight gradients are added to main_grad.",
    "vision_cuda_graph_tuning.gradient_hooks": "Remove it: register hooks on parameters, which replays run.",
    "vision_cuda_graph_tuning.headroom": "Remove it: automatic buckets are captured for the sizes that come.",
    "vision_cuda_graph_tuning.offload_host_max_gb": _HOST,
    "vision_cuda_graph_tuning.offload_min_bytes": _SMALLEST,
    "vision_cuda_graph_tuning.streams": "Remove it: the plugin chooses.",
}


def refuse_gone(field: str, value: Any) -> None:
    """Refuse a value of an option that has gone.

    Raises:
        OptionError: The option has gone, and the value asks for it.
    """
    if field in GONE and not is_unset(value):
        why = f"Cannot use {field}={value!r}: the option has gone in bridge_cg_plugin {SINCE}."
        raise OptionError.because(field, f"{why} {GONE[field]}")


_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: The attribute of its group's dataclass.
        field: The field of a model's configuration; with the mapping's name in front for a tuning value.
        default: The value where nothing is chosen.
        parse: Returns the typed value of what was written.
        help: What it means, in a phrase.
        details: Further sentences in Markdown, for docs/options.md.
        flags: Names of its flag, with underscores and without dashes in front; none where empty.
        tuning: Whether it is an entry of the group's mapping of tuning values and no field of its own.
        upstreams: Whether the field is upstream's; the plugin adds others to model providers.
    """

    name: str
    field: str
    default: Any
    parse: Parser
    help: str
    details: str = ""
    flags: tuple[str, ...] = ()
    tuning: bool = False
    upstreams: bool = False

    @property
    def allowed(self) -> str:
        """Which values there are, in words."""
        return f"{self.parse.allowed}; None" if self.default is None else self.parse.allowed


def option(default: Any, parse: Parser, help: str, details: str = "", **further: Any) -> Any:
    """Declare an option as a field of a dataclass; for the arguments see `Option`.

    `field` and `flags` are given only where they are not named after the group.
    """
    return dataclasses.field(
        default=default, metadata={_KEY: {"parse": parse, "help": help, "details": details, **further}}
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
        tuning = said.get("tuning", False)
        field = said.pop("field", f"{self.tuning}.{declared.name}" if tuning else f"{self.prefix}{declared.name}")
        flags = said.pop("flags", () if tuning else (field,))
        return Option(name=declared.name, field=field, default=declared.default, flags=flags, **said)

    @property
    def fields(self) -> dict[str, str]:
        """Option -> field of a model's configuration."""
        return {one.name: one.field for one in self.options}

    @property
    def tuning(self) -> str:
        """The field that holds the mapping of tuning values."""
        return f"{self.prefix}tuning"

    @cached_property
    def tuned(self) -> tuple[Option, ...]:
        """The options that are tuning values."""
        return tuple(one for one in self.options if one.tuning)

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, tuning values included."""
        return tuple(one.field for one in self.options)

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes of a model's configuration that hold all of this."""
        fields = tuple(name for name in self.names if "." not in name)
        return (*fields, self.tuning) if self.tuned else fields

    @property
    def added(self) -> dict[str, Any]:
        """Field that the plugin adds to model providers -> default."""
        found = {one.field: one.default for one in self.options if not one.upstreams and not one.tuning}
        return {**found, self.tuning: None} if self.tuned else found

    def read(self, source: Any) -> dict[str, Any]:
        """Return the typed values of the options that a mapping of fields, or an object that has them, gives.

        Raises:
            OptionError: A value cannot work.
        """
        get = getter(source)
        tuned = self.tuning_values(get(self.tuning)) if self.tuned else {}
        if isinstance(source, Mapping):  # which may have tuning values as fields, too
            tuned |= {one.field: source[one.field] for one in self.tuned if one.field in source}
        given = {one: tuned.get(one.field) if one.tuning else get(one.field) for one in self.options}
        return {one.name: one.parse(one.field, value) for one, value in given.items() if not is_unset(value)}

    def tuning_values(self, written: Any) -> dict[str, Any]:
        """Return tuning values as fields, unparsed.

        Args:
            written: The mapping, also as text: `name=value,name=value`. None gives every value back its default.

        Raises:
            OptionError: It is no mapping, or has a name that does not exist.
        """
        if is_unset(written):
            return dict.fromkeys(one.field for one in self.tuned)
        given = written if isinstance(written, Mapping) else self._pairs(written)
        fields = {one.name: one.field for one in self.tuned}
        found = {}
        for key, value in given.items():
            name = str(key).replace("-", "_")
            if (gone := f"{self.tuning}.{name}") in GONE:
                refuse_gone(gone, value)
                continue
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
                what = "tuning value" if near else f"tuning value; there are {', '.join(fields)}"
                raise OptionError.unknown(f"{self.tuning}.{key}", what, fields[near[0]] if near else "")
            found[fields[name]] = value
        return found

    def _pairs(self, written: Any) -> dict[str, str]:
        items = written if isinstance(written, list | tuple) else str(written).strip("{} ").split(",")
        pairs = [re.split(r"[=:]", str(item), maxsplit=1) for item in items if str(item).strip()]
        if not all(len(pair) == 2 for pair in pairs):
            raise OptionError(self.tuning, written, "name=value,name=value", "Write a value for each name.")
        return {name.strip(" '\""): value.strip(" '\"") for name, value in pairs}


def getter(source: Any) -> Callable[[str], Any]:
    """Return a function that returns a field of a mapping or an object; None where it is absent."""
    return source.get if isinstance(source, Mapping) else lambda name: getattr(source, name, None)


def plain(value: Any) -> Any:
    """Return a value as configurations hold it: tuples as lists, enums by name."""
    return [plain(item) for item in value] if isinstance(value, tuple) else getattr(value, "name", value)
