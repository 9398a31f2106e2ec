"""What a user wrote, collected from any source: mappings, YAML, command lines, Hydra-style words, config objects."""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .declaration import GONE, OptionError, refuse_gone
from .facts import OF_TEXT, ONE_LENGTH, SETTINGS, Facts
from .graph_options import GROUPS
from .language_model import DEPRECATED, IMPL, INFERENCE, LANGUAGE_MODEL, MODULES, SCOPE, SWITCHES

LANGUAGE_MODEL_FIELDS = (*LANGUAGE_MODEL.names, *DEPRECATED)
FIELDS = (*(name for group in GROUPS for name in group.names), *DEPRECATED)
# Upstream's other fields of similar names, which are none of this package's business.
OTHER_FIELDS = (
    "cuda_graph_use_single_mempool",
    "cuda_graph_retain_backward_graph",
    "moe_pad_experts_for_cuda_graph_inference",
    "optimizer_cuda_graph",
    "optimizer_offload_fraction",
    "activation_offload_fraction",
    "delay_offload_until_cuda_graph",
    "delta_offload_bytes_across_pp_ranks",
    "min_offloaded_tensor_size",
    "megatron_fsdp_cuda_graph_mode",
)
MODEL_SECTIONS = ("model", "config", "cfg", "provider", "transformer")
OTHER_SECTIONS = ("rng", "ddp", "dist", "rerun_state_machine", "dataset", "peft")
_KNOWN = (*FIELDS, *OTHER_FIELDS, *(name for name in SETTINGS if "cuda_graph" in name))
# Fields that say the same thing: what is written later replaces all of a group.
_GROUPS = ((IMPL, *SWITCHES), (MODULES, SCOPE))
_ASSIGNMENT = re.compile(r"[+]{0,2}([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_WORDS = re.compile(r"\s*([+]{0,2}[A-Za-z_][\w.\-]*=|--\w)")
_DEPTH = 8


def set_together(name: str) -> tuple[str, ...]:
    """Return the fields that set the same option as a field, itself among them."""
    return next((group for group in _GROUPS if name in group), (name,))


@dataclass(frozen=True, slots=True)
class Written:
    """Fields and settings as they were written, not parsed yet.

    Attributes:
        fields: Field of a model's configuration -> value.
        explicit: Fields and settings that a person wrote; others are those of a config object, defaults included.
        settings: Other settings that combinations depend on.
        model: The config object of the model, if there is one.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    settings: dict[str, Any] = field(default_factory=dict)
    model: Any = None

    @property
    def facts(self) -> Facts:
        """The settings, typed.

        Raises:
            OptionError: A setting has no value of its kind.
        """
        return Facts.of(self.settings, self.model)

    def then(self, later: "Written") -> "Written":
        """Return both, the later one winning."""
        gone = {name for group in _GROUPS if not later.fields.keys().isdisjoint(group) for name in group}
        if IMPL in gone and INFERENCE not in self.explicit:
            gone.add(INFERENCE)  # derived from the implementation that is replaced
        kept = {name: value for name, value in self.fields.items() if name not in gone}
        return Written(
            {**kept, **later.fields},
            (self.explicit - gone) | later.explicit,
            {**self.settings, **later.settings},
            self.model if later.model is None else later.model,
        )


def collect(*sources: Any) -> Written:
    """Return what the sources say, later ones winning.

    A source is a mapping, flat or nested as a configuration is; a path of a YAML file or its text; words of a command
    line (`name=value`, `--name value`), as one string or a list; a model's config object or a whole configuration.

    Raises:
        OptionError: A source cannot be read, or has a field that looks like a graph option and is none.
    """
    found = Written()
    for source in sources:
        found = found.then(_one(source))
    return found


def _one(source: Any) -> Written:
    if source is None:
        return Written()
    if isinstance(source, Written):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, Path):
        return _from_mapping(_load_yaml(source))
    if isinstance(source, str):
        return _from_text(source)
    if isinstance(source, Sequence):
        return _from_words(source)
    return _from_object(source)


def is_word(token: str) -> bool:
    """Whether a token of a command line is an assignment, a flag or a YAML file."""
    assigned = token.startswith("--") or _ASSIGNMENT.fullmatch(token) is not None
    return assigned or token.lower().endswith((".yaml", ".yml"))


def _from_text(text: str) -> Written:
    if not _WORDS.match(text) and ("\n" in text or re.match(r"\s*[\w.]+:(\s|$)", text)):
        return _from_mapping(_parse_yaml(text, "YAML text"))
    try:
        given = shlex.split(re.sub(r",\s+", ",", text))
    except ValueError as error:
        raise OptionError.because("words", f"Cannot read the words {text!r}: {error}.") from None
    return _from_words(given)


def _from_words(given: Sequence[Any]) -> Written:
    found, together = Written(), []
    position = 0
    while position < len(given):
        token = str(given[position])
        assignment = _ASSIGNMENT.fullmatch(token.removeprefix("--"))
        position += 1
        if assignment:
            together.append((assignment[1], assignment[2]))
        elif token.startswith("--"):
            end = position
            while end < len(given) and not is_word(str(given[end])):
                end += 1
            value = ",".join(map(str, given[position:end])) if end > position else True
            together.append((token.removeprefix("--"), value))
            position = end
        elif is_word(token):
            found = found.then(_assigned(together)).then(_from_mapping(_load_yaml(Path(token))))
            together = []
        else:
            kinds = "name=value, --name value, a YAML file or a recipe's name"
            raise OptionError.because("argument", f"Cannot use {token!r}: it must be {kinds}.")
    return found.then(_assigned(together))


def _assigned(pairs: Sequence[tuple[str, Any]]) -> Written:
    leaves, settings = [], {}
    for name, value in pairs:
        *path, leaf = name.replace("-", "_").split(".")
        _refuse_sections([*path, leaf], value)
        if not path or path[-1] in MODEL_SECTIONS:
            leaves.append((leaf, value))
        elif leaf in FIELDS:
            raise OptionError.because(
                name, f"Cannot use {name}={value!r}: graph options are fields of the model. Write model.{leaf}."
            )
        elif leaf in SETTINGS:
            settings[leaf] = value
    found = _from_leaves(leaves)
    return Written(found.fields, found.explicit | settings.keys(), {**found.settings, **settings})


def _from_mapping(source: Mapping[str, Any]) -> Written:
    saved = _is_saved(source)
    leaves, settings = [], {}
    for section, name, value in _walk(source):
        if section in (None, *MODEL_SECTIONS):
            leaves.append((name, value))
        elif section in OTHER_SECTIONS and name in SETTINGS:
            settings[name] = value
    found = _from_leaves(leaves, check=not saved)
    settings = {**found.settings, **settings}
    return Written(found.fields, frozenset() if saved else found.explicit | settings.keys(), settings)


def _walk(
    source: Mapping[str, Any], section: str | None = None, depth: int = 0
) -> Iterator[tuple[str | None, str, Any]]:
    for key, value in source.items():
        *path, name = str(key).replace("-", "_").split(".")
        _refuse_sections([*path, name], value)
        inside = path[-1] if path else section
        if isinstance(value, Mapping) and depth < _DEPTH and name in MODEL_SECTIONS + OTHER_SECTIONS:
            yield from _walk(value, name, depth + 1)
        else:
            yield inside, name, value


def _from_leaves(leaves: Sequence[tuple[str, Any]], check: bool = True) -> Written:
    fields: dict[str, Any] = {}
    settings = {}
    for name, value in leaves:
        if name in FIELDS:
            fields[name] = value
        elif name in SETTINGS:
            settings[name] = value
        elif name in GONE:
            refuse_gone(name, value)
        elif check:
            _refuse_lookalike(name, value)
    return Written(fields, frozenset(fields) | settings.keys(), settings)


def _refuse_sections(path: Sequence[str], value: Any) -> None:
    """Refuse a word one of whose sections is an option that has gone, or looks like one.

    Raises:
        OptionError: It is.
    """
    for depth, section in enumerate(path[:-1]):
        refuse_gone(".".join(path[depth:]), value)
        if _of_graphs(section) and section not in GONE:
            raise OptionError.unknown(".".join(path), "section", "model.NAME=VALUE")


def refuse_unknown(name: str, value: Any) -> None:
    """Refuse a name that is neither an option nor a setting that options depend on.

    Raises:
        OptionError: Names the nearest, or says that the option has gone.
    """
    refuse_gone(name, value)
    if name not in (*FIELDS, *SETTINGS, *GONE):
        near = difflib.get_close_matches(name, (*FIELDS, *SETTINGS), n=1, cutoff=0.4)
        raise OptionError.unknown(name, "option in docs/options.md", near[0] if near else "")


def _refuse_lookalike(name: str, value: Any) -> None:
    if name not in _KNOWN and ((near := _nearest(name, _KNOWN)) or _of_graphs(name)):
        raise OptionError.unknown(name, "option in docs/options.md", near)


def _of_graphs(name: str) -> bool:
    return "cuda_graph" in name or "cudagraph" in name


@cache
def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if _of_graphs(name) else 0.88)
    return near[0] if near else ""


def _from_object(source: Any) -> Written:
    model = getattr(source, "model", None)
    model = source if model is None else model
    sections = [model, *(getattr(source, name, None) for name in OTHER_SECTIONS if model is not source)]
    settings: dict[str, Any] = {}
    for section in sections:
        for name in SETTINGS:
            if hasattr(section, name) and not settings.get(name):
                settings[name] = getattr(section, name)
    text = settings.get(OF_TEXT) or {}
    if OF_TEXT in settings and isinstance(text, Mapping):
        settings |= {OF_TEXT: text, ONE_LENGTH: settings.get(ONE_LENGTH) or text.get(ONE_LENGTH, False)}
    for name in GONE.keys() & getattr(model, "__dict__", {}):  # a stand-in has every attribute
        refuse_gone(name, vars(model)[name])
    return Written(fields_of(model), frozenset(), settings, model)


def fields_of(model: Any) -> dict[str, Any]:
    """Return the graph fields that a model's config object holds."""
    return {name: getattr(model, name) for name in FIELDS if hasattr(model, name)}


def misspelt(model: Any) -> dict[str, str]:
    """Return the attributes of a model's config that are no fields of it and look like options -> the option."""
    declared = {*_KNOWN, *dir(type(model)), *getattr(model, "__dataclass_fields__", ())}
    strange = (name for name in getattr(model, "__dict__", {}) if name not in declared and name[0] != "_")
    return {name: near for name in strange if (near := _nearest(name, FIELDS))}


def _is_saved(source: Mapping[str, Any]) -> bool:
    return "_target_" in source or any(isinstance(v, Mapping) and "_target_" in v for v in source.values())


def _load_yaml(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise OptionError.because("file", f"Cannot read the YAML file {path}: {error}.") from None
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, name: str) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise OptionError.because("YAML", f"Cannot parse {name}: {error}.") from None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        why = f"it must hold a mapping of fields, and holds {type(found).__name__}"
        raise OptionError.because("YAML", f"Cannot use {name}: {why}.")
    return found
