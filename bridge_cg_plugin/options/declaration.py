"""What an option is: declared once, as a dataclass field, from which flags, provider fields, docs and `explain` come.

A group of options is a frozen dataclass. `option` takes the default, the parser and the help of one of its fields, and
what else is known of it. Nothing else lists it: flags (`flags`), fields of model providers
(`upstream.hooks.provider_fields`), what a release has (`releases`), features that need seams
(`upstream.seams.features`), the tables of docs/options.md and `bridge-cg explain` (`explain`) read the group.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .values import OptionError, Parser, is_unset

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
    "vision_cuda_graph_balance": "Remove it: images stay on their ranks.",
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
