"""A command line, applied to a Bridge configuration: Bridge's own overrides, then graph options.

Upstream's scripts/performance, launched as they are, take the flags of graphs, too.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ...options import GraphOptions, OptionError, normalize
from ...options.declaration import is_unset, refuse_gone
from ...options.flags import clear_flags, given_flags, take_flags
from ...options.graph_options import SETTING, asks_for_vision_graphs
from ...options.language_model import IMPL, SCOPE
from ...options.normalization import TRACKERS, refuse_other_trackers
from ...options.precedence import settle
from ...options.sources import FIELDS, SETTINGS, Written, collect, fields_of
from ..seams.patches import Patch
from ..seams.registry import seam
from .graph_fields import applied, apply_environment, apply_options, collect_for_start, set_graphs
from .training_config import check_configuration


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_PLAIN: dict[str, tuple[str, Callable[[str], bool]]] = {
    "bool": ("true or false", lambda text: text.lower() in ("true", "false", "0", "1")),
    "int": ("a whole number", lambda text: re.fullmatch(r"[+-]?\d+(_\d+)*", text) is not None),
    "float": ("a number", _is_number),
}
_NONE = {"None", "NoneType", "Optional", "Union", "typing"}


def check_value(name: str, annotation: Any, held: Any, text: str) -> None:
    """Refuse a value of another type than the field's, which Hydra would set all the same.

    A field is checked if its annotation has numbers and booleans only. Upstream's annotations are not always right: a
    value of the type that the field holds is accepted too.

    Args:
        name: The field's name on the command line.
        annotation: Its type, or the text of it.
        held: The value that it has.
        text: The value on the command line.

    Raises:
        OptionError: The value cannot be of such a type.
    """
    described = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = {*re.findall(r"\w+", described)} - _NONE
    of_held = set() if held is None else {type(held).__name__}
    if not kinds or not kinds | of_held <= _PLAIN.keys() or text == "null" or "${" in text:
        return
    if not any(_PLAIN[kind][1](text.strip()) for kind in kinds | of_held):
        allowed = " or ".join(_PLAIN[kind][0] for kind in sorted(kinds | of_held))
        raise OptionError(name, text, allowed, "Correct the value.")


ApplyWords = Callable[[Any, Sequence[str]], None]
_NAN_CHECK = "check_for_nan_in_loss"
_WORD = re.compile(r"(?P<how>[+]{0,2}|~)(?P<name>[A-Za-z_][\w.@/\-]*)(=(?P<value>.*))?", re.DOTALL)


def apply_overrides(
    config: Any, flags: Mapping[str, Any], words: Sequence[str] = (), apply: ApplyWords | None = None
) -> GraphOptions:
    """Apply flags, and the words after them, which win; returns the graph options of the result.

    Words that set graph fields go the way of flags, so every spelling is accepted and checked with the rest of the
    configuration; all others go through Bridge's own Hydra machinery before that.

    Args:
        config: A Bridge `ConfigContainer`.
        flags: Fields of the model and what was written, as `options.flags.given_flags` returns them.
        words: Hydra-style `section.name=value`.
        apply: Sets the words that are no graph options; Bridge's Hydra machinery if left out.

    Raises:
        OptionError: A word names nothing, or the options cannot work; the message names what is nearest or allowed.
    """
    of_graphs = graph_words(words)
    others = [word for word in words if word not in of_graphs]
    for word in others:
        check_word(config, word)
    if others:
        (apply or _apply_words)(config, others)
    names = {word.partition("=")[0] for word in others}
    if "dataset.seq_length" in names and "model.seq_length" not in names:  # Bridge wants both alike
        config.model.seq_length = config.dataset.seq_length
    if not (flags or of_graphs):
        return normalize(collect_for_start(config))[0]
    trackers = [word for word in others if _leaf(word) in TRACKERS]
    settings = {} if trackers else dict.fromkeys(TRACKERS, True)
    if _NAN_CHECK not in map(_leaf, others):
        settings[_NAN_CHECK] = False
    options, written = normalize(collect_for_start(config), settings, trackers, flags, of_graphs)
    apply_options(options, config, written.facts)
    return options


def resolve(
    config: Any, flags: Mapping[str, Any], words: Sequence[str] = (), apply: ApplyWords | None = None
) -> GraphOptions:
    """Apply flags and words as `apply_overrides` does, and check the result as training will.

    Raises:
        OptionError: A word names nothing, or training would refuse the result.
    """
    options = apply_overrides(config, flags, words, apply)
    if apply_environment(config):
        options = applied(config.model, normalize(collect_for_start(config))[0])
    check_configuration(config)
    return options


def apply_to_bridges(config: Any, before: Written, written: Written, flags: Mapping[str, Any]) -> None:
    """Apply graph options to a configuration that Bridge's own overrides have changed already.

    Without flags, Bridge's result stays as it is unless something written contradicts what the recipe held, or
    `cuda_graphs` is set: it is resolved while it is known which fields were written. Of other settings only those are
    checked that a person wrote and that graphs would change.

    Args:
        config: A Bridge `ConfigContainer`.
        before: What it held before Bridge's overrides.
        written: What a person wrote in these overrides.
        flags: Fields of the model that flags set; they count as written by the same person.

    Raises:
        OptionError: The options cannot work; no graph option was set.
    """
    together = before.then(written)
    refuse_other_trackers(together)
    chosen = not is_unset(together.fields.get(SETTING)) and together.explicit - {SETTING} - set(SETTINGS)
    if flags or chosen or settle(together)[0] != together:
        held = replace(collect_for_start(config), fields=before.fields)  # other settings as they are now
        options = normalize(held, written, flags)[0]
        apply_options(options, config, Written(settings=written.settings).facts)


def written_by_bridge(config: Any, file: str | Path | None, words: Sequence[str]) -> Written:
    """Return the graph fields that Bridge's own overrides wrote, with the values that the configuration then holds.

    Bridge has resolved what was written by then. Fields that the model does not have are left out. Of other settings
    only the written ones that graphs would change are included.

    Args:
        config: A Bridge `ConfigContainer`, or a model's config object, after the overrides.
        file: The YAML file of the overrides.
        words: Their Hydra-style words.
    """
    loaded = _load(file)
    within = getattr(config, "model", None) is not None
    model, section = (config.model, loaded.get("model")) if within else (config, loaded)
    in_file = frozenset(section) if isinstance(section, Mapping) else frozenset()
    in_words = frozenset(map(_leaf, graph_words(words)))
    said = in_file | in_words
    fields = {name: value for name, value in fields_of(model).items() if name in said}
    explicit = in_words if "_target_" in in_file else said
    settings = _settings_written(config, loaded, words)
    return Written(fields, (explicit & fields.keys()) | settings.keys(), settings)


def _refuse_lost(config: Any, file: str | Path | None, words: Sequence[str]) -> None:
    """Refuse options that have gone, or look like one: Hydra would let them pass without effect.

    Raises:
        OptionError: Bridge's own overrides set one.
    """
    model = getattr(config, "model", None) or config
    section = _load(file) if model is config else _load(file).get("model")
    given = dict(section) if isinstance(section, Mapping) else {}
    for match in filter(None, map(_WORD.fullmatch, words)):
        name = match["name"].removeprefix("model.")
        if name != match["name"] or not hasattr(config, name.partition(".")[0]):
            given[name] = match["value"]
    collect({name: value for name, value in given.items() if not hasattr(model, str(name).partition(".")[0])})


def _settings_written(config: Any, loaded: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return, of the settings that graphs change, those that a person wrote; the tracker's two fields go together."""
    sections = [s for s in (loaded, *loaded.values()) if isinstance(s, Mapping) and "_target_" not in s]
    said = {*map(_leaf, words), *(name for section in sections for name in section)}
    names = {*(() if said.isdisjoint(TRACKERS) else TRACKERS), *said.intersection([_NAN_CHECK])}
    return {name: value for name, value in collect(config).settings.items() if name in names}


def _load(file: str | Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    loaded: Any = OmegaConf.to_container(OmegaConf.load(file)) if file and Path(file).is_file() else {}
    return loaded if isinstance(loaded, dict) else {}


def check_word(config: Any, word: str) -> None:
    """Refuse a word that names nothing in a configuration, or gives a field a value of another type.

    Raises:
        OptionError: It is no assignment, there is no such field (names the nearest), or its value cannot be this.
    """
    match = _WORD.fullmatch(word)
    if match is None or (match["value"] is None and match["how"] != "~"):
        raise OptionError.because("argument", f"Cannot use {word!r}: it must be section.name=value.")
    owner, path = config, match["name"].split(".")
    for depth, part in enumerate(path):
        section = ".".join(path[:depth])
        if not dataclasses.is_dataclass(owner):  # a mapping, a list, None: Hydra checks what is allowed there
            return
        names = {f.name for f in dataclasses.fields(owner)} | vars(owner).keys()
        if part not in names:
            if section in ("", "model"):
                refuse_gone(".".join(path[depth:]), match["value"])
            known = {name: f"{section}.{name}" for name in names} if section else _places(config, names, path)
            public = [name for name in known if not name.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1, cutoff=0.5)
            what = f"field of {section or 'the configuration'}"
            raise OptionError.unknown(match["name"], what, known[near[0]] if near else "")
        if depth == len(path) - 1 and match["value"] is not None:
            annotation = next((f.type for f in dataclasses.fields(owner) if f.name == part), "")
            check_value(match["name"], annotation, getattr(owner, part, None), match["value"])
        owner = getattr(owner, part, None)


def _places(config: Any, names: set[str], path: Sequence[str]) -> dict[str, str]:
    """Return how a configuration's fields are written by their names; those of its sections for a word without one.

    Of several sections that have a field of one name, the model's is meant.
    """
    ordered = sorted(names, key=lambda name: (name == "model", name)) if len(path) == 1 else []
    sections = {name: getattr(config, name, None) for name in ordered}
    inside = {
        field.name: f"{name}.{field.name}"
        for name, section in sections.items()
        if dataclasses.is_dataclass(section)
        for field in dataclasses.fields(section)
    }
    return {**inside, **{name: name for name in (*names, *FIELDS)}}


def graph_words(words: Sequence[str]) -> list[str]:
    """Return the Hydra-style words that set graph fields of the model."""
    matches = [match for match in map(_WORD.fullmatch, words) if match and match["value"] is not None]
    return [match.string for match in matches if match["name"].removeprefix("model.") in FIELDS]


def _leaf(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").rpartition(".")[2]


def _apply_words(config: Any, words: Sequence[str]) -> None:
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    try:
        process_config_with_overrides(config, cli_overrides=list(words))
    except OverridesError as error:
        raise OptionError.because("overrides", f"Cannot use {' '.join(words)}: Hydra refuses it. {error}.") from None


# What upstream's module defines, and others of its name do not.
DEFINED = "set_workload_base_configs"
# Graph options among a configuration's Hydra words, until its parsed arguments come, by the configuration's id: what
# the words set, and the flags between them.
_words: dict[int, tuple[Written, dict[str, Any]]] = {}


@dataclass(slots=True)
class ScriptPatch(Patch):
    """A patch of a module that has no package of its own: another module of the same name is left alone."""

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute if the module is upstream's."""
        if hasattr(module, DEFINED):
            Patch.apply(self, module)
        else:
            self.state, self.reason = "native", "another module of this name"


def _after_words(old: Callable[..., Any]) -> Callable[..., Any]:
    def set_cli_overrides(recipe: Any, cli_overrides: list[str]) -> Any:
        flags, rest = take_flags(cli_overrides or [])
        _refuse_lost(recipe, None, rest)
        recipe = old(recipe, rest)
        written = written_by_bridge(recipe, None, rest)
        if flags or written.fields:
            _words[id(recipe)] = written, flags
        return recipe

    return set_cli_overrides


def _with_graphs(old: Callable[..., Any]) -> Callable[..., Any]:
    """Graph options come first: what upstream does next depends on them. It switches off the tracker of images, too."""

    def set_user_overrides(recipe: Any, args: Any) -> Any:
        written, flags = _words.pop(id(recipe), (Written(), {}))
        flags = {**flags, **given_flags(args)}
        if flags:
            set_graphs(recipe, written, flags)
        recipe = old(recipe, clear_flags(args, (IMPL, SCOPE)))
        if asks_for_vision_graphs(recipe.model):
            recipe.rng.te_rng_tracker = recipe.model.use_te_rng_tracker = True
        return recipe

    return set_user_overrides


def _without_flags(old: Callable[..., Any]) -> Callable[..., Any]:
    def process_config_with_overrides(
        config: Any, config_filepath: Any = None, cli_overrides: list[str] | None = None
    ) -> Any:
        flags, rest = take_flags(cli_overrides or [])
        before = collect(config)
        _refuse_lost(config, config_filepath, rest)
        config = old(config, config_filepath, rest or None)
        apply_to_bridges(config, before, written_by_bridge(config, config_filepath, rest), flags)
        return config

    return process_config_with_overrides


PATCHES = (
    ScriptPatch(seam("performance_user_overrides"), _with_graphs),
    ScriptPatch(seam("performance_words"), _after_words),
    Patch(seam("hydra_words"), _without_flags),
)
