"""The command `bridge-cg explain`."""

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import (
    GraphOptions,
    OptionError,
    check_options,
    normalize,
)
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.explain import HEAD, WIDTHS, text_table
from bridge_cg_plugin.options.flags import FLAGS, as_typed, take_flags, unknown_flag
from bridge_cg_plugin.options.graph_options import LANGUAGE_MODEL_PART, VISION_ENCODER, split_name, tuning_of
from bridge_cg_plugin.options.sources import (
    ATTRIBUTES,
    FIELDS,
    MODEL_SECTIONS,
    OTHER_FIELDS,
    SETTINGS,
    is_word,
    names_in,
)
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.recipes import GPUS, RECIPES, with_graphs
from bridge_cg_plugin.upstream.seams.encoders import NO_ADAPTER, encoder_of, has_audio_encoder

from ..answers import Tell, between, table, wrapped
from ..checks import LAYOUTS, add_counts, check_trainable, divided, layout_in_words
from ..measured import Forecast, WholeStep, language_forecast, vision_forecast, whole_step
from . import models
from .recipes import built, require_bridge, resolved, without_imports

SECTIONS = frozenset(
    {
        *MODEL_SECTIONS,
        *("checkpoint", "comm_overlap", "dataset", "ddp", "dist", "ft", "inprocess_restart", "logger"),
        *("mixed_precision", "nvrx_straggler", "optimizer", "optimizer_config_override_provider", "peft", "profiling"),
        *("rerun_state_machine", "rng", "scheduler", "straggler", "tensor_inspect", "tokenizer", "train", "validation"),
    }
)
_FLAGS = tuple(spelling for flag in FLAGS for spelling in flag.spellings)
_TRACKER = "rng.te_rng_tracker"
_UPSTREAMS = (
    "This recipe switches upstream's own vision graphs on. Without the plugin they compute another function than eager "
    "(docs/performance.md)."
)
_NO_FIGURES = "Times and memory depend on the encoder: write a recipe's name first."
_NO_GRAPHS = "No graphs are on. Add cuda_graphs=exact to see what can run on them."
_LAYOUT = tuple(dict.fromkeys(field for layout in LAYOUTS for field in layout))
_OWN_FLAGS = ("--graphs", "--nodes", "--gpus_per_node", "--json", *(f"--{field}" for field in _LAYOUT))


NOT_MEASURED = "not measured"
AUDIO_ENCODER = "audio encoder"


@dataclass(frozen=True, slots=True)
class Line:
    """One part of a model.

    Attributes:
        part: Its name.
        runs: "graphs" or "eager"; of offloading, "on".
        why: What is captured, or what keeps it eager.
        memory: Of one slot with the largest bucket.
        ratio: Time on graphs over time eager, forward and backward.
        options: Other options of it, as `field=value`.
    """

    part: str
    runs: str
    why: str
    memory: str = wording.NO_FIGURE
    ratio: str = wording.NO_FIGURE
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer.

    Attributes:
        options: What the words resolve to, checked as training does.
        encoder: The vision encoder of the recipe's model in words; empty without one.
        has_audio: Whether the model has an audio encoder that graphs take.
        forecast: What was measured of the vision encoder; None where the model has none, or no recipe names one.
        language_model: What was measured of graphs of packed documents; None without such graphs or without a recipe.
        step: The measured whole step that is nearest; None where no record is of such a model or there is no recipe.
        has_model: Whether there is a recipe, so that it is known whether the model has an encoder.
        layout: Over how many GPUs each field divides the model, and the replicas; empty where nobody said.
        notes: Sentences for a person.
    """

    options: GraphOptions
    encoder: str = ""
    has_audio: bool = False
    forecast: Forecast | None = None
    language_model: Forecast | None = None
    step: WholeStep | None = None
    has_model: bool = False
    layout: dict[str, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the table."""
        found = [self._line(part) for part in wording.parts(self.options)]
        if self.has_audio:
            found.insert(1, self._audio())
        if self.step is not None and self.step.holds:
            memory = f"{self.step.found['memory_gb']:.1f} GiB"
            why = f"measured: {self.step.found['case']}"
            found.append(Line("whole step", "graphs", why, memory, between(self.step.ratios)))
        return tuple(found)

    def _audio(self) -> Line:
        vision = self.options.vision
        if not vision.enabled:
            return Line(AUDIO_ENCODER, "eager", f"{PROVIDER_FIELDS['impl']}=none")
        why = "one graph per bucket over the whole encoder; buckets captured on demand"
        return Line(AUDIO_ENCODER, "graphs", why, NOT_MEASURED, NOT_MEASURED)

    def _line(self, part: wording.Part) -> Line:
        encoder = part.name == VISION_ENCODER
        if encoder and self.has_model and self.forecast is None:
            if NO_ADAPTER in self.encoder:
                return Line(part.name, "eager", "no adapter for it is known", options=part.options)
            return Line(part.name, "none", "the model has none that graphs support", options=part.options)
        if part.runs != "graphs":
            return Line(part.name, part.runs, part.why, options=part.options)
        found = self.forecast if encoder else self.language_model
        if found is None or part.name not in (VISION_ENCODER, LANGUAGE_MODEL_PART):
            figures = wording.NO_FIGURE if encoder else NOT_MEASURED
            return Line(part.name, part.runs, part.why, figures, figures, part.options)
        return Line(part.name, part.runs, part.why, *_measured(found), part.options)


def _measured(found: Forecast) -> tuple[str, str]:
    """Return memory and ratio of a part."""
    if not found.holds or found.ratios is None:
        return NOT_MEASURED, NOT_MEASURED
    memory = NOT_MEASURED if found.memory_gb is None else f"{found.memory_gb:.1f} GiB"
    return wording.BY_SIZE if found.largest is None else memory, between(found.ratios)


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain values."""
    return {
        "encoder": answer.encoder,
        **wording.as_json(answer.options),
        "table": [asdict(line) for line in answer.lines],
        "forecast": None if answer.forecast is None else answer.forecast.as_json(),
        "language_model_forecast": None if answer.language_model is None else answer.language_model.as_json(),
        "whole_step": None if answer.step is None else answer.step.as_json(),
        "layout": answer.layout,
        "notes": list(answer.notes),
    }


_HEAD, _COLUMNS = (*HEAD, "time/eager", "why"), (*WIDTHS, 10, 34)
_FIGURES = ("case", "tokens", "time/eager", "GiB a slot")


def render(answer: Answer) -> str:
    """Return an answer as lines for a person."""
    rows = [(line.part, line.runs, line.memory, line.ratio, line.why) for line in answer.lines]
    options = [option for line in answer.lines for option in line.options]
    lines = text_table([_HEAD, *rows], _COLUMNS)
    lines += [f"options: {' '.join(options)}"] if options else []
    lines += [f"vision encoder: {answer.encoder}"] if answer.encoder else []
    for found in (answer.forecast, answer.language_model):
        lines += [] if found is None else _forecast(found)
    lines += [] if answer.step is None else ["", answer.step.said()]
    lines += [*answer.notes, *(f"warning: {text}" for text in answer.options.warnings)]
    return "\n".join(line for text in lines for line in wrapped(text))


def _forecast(found: Forecast) -> list[str]:
    if found.found is None:
        return ["", *found.said()]
    title = f"{found.of}, forward and backward of a microbatch"
    if found.of != found.found.of:
        title = f"{found.of} was not measured. The nearest, forward and backward of a microbatch: {found.found.of}"
    rows = [
        (row.case, str(row.tokens), f"{row.ratio:.2f}", "-" if row.memory_gb is None else f"{row.memory_gb:.1f}")
        for row in found.rows
    ]
    return ["", f"{title}:", *table([_FIGURES, *rows]), *found.said()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("input", nargs="*", help="a recipe's name, a YAML file, name=value or --name value")
    _add_place(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", choices=tuple(GPUS), help="graphs within this GPU's limits, on the recipe")
    add_counts(parser, "machines; the layout and the batch must fit all GPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a recipe would train.

    Attributes:
        graphs: The GPU of graphs that are switched on in the recipe; None leaves the recipe as it is.
        nodes: Machines; None is not known.
        gpus_per_node: GPUs of each; None is not known.
    """

    graphs: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None

    @property
    def gpus(self) -> int | None:
        """GPUs of all machines; None where nothing was said of them."""
        if self.nodes is None and self.gpus_per_node is None:
            return None
        return (self.nodes or 1) * (self.gpus_per_node or 1)

    def check(self, has_recipe: bool) -> None:
        """Refuse what has no effect without a recipe.

        Raises:
            OptionError: Names the flag.
        """
        given = [flag for flag, value in asdict(self).items() if value is not None]
        if given and not has_recipe:
            name = given[0]
            raise OptionError.because(name, f"Cannot use --{name} without a recipe. Write a recipe's name first.")


def run(given: Sequence[str], tell: Tell) -> int:
    """Print what a command line resolves to; returns 2 if it is refused, else 0.

    Args:
        given: A recipe's name, what is written beside it, and the command's own flags.
        tell: Prints the answer.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_place(own)
    parsed, words = own.parse_known_args(given)
    place = Place(**{one.name: getattr(parsed, one.name) for one in fields(Place)})
    try:
        answer = look(words, place)
    except OptionError as error:
        print(as_typed(error, given), file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    tell(json.dumps(as_json(answer)) if parsed.json else render(answer))
    return 0


def explain(words: Sequence[str], place: Place | None = None) -> GraphOptions:
    """Return the options that words resolve to; see `look`.

    Raises:
        OptionError: Training would refuse them, or a word means nothing.
    """
    return look(words, place or Place()).options


def look(words: Sequence[str], place: Place) -> Answer:
    """Return what words resolve to, checked as training does, and what to expect of it.

    Args:
        words: A recipe's name, and what is written beside it.
        place: Where it would train.

    Raises:
        OptionError: Training would refuse it, or a word means nothing.
    """
    recipe = [word for word in words[:1] if not is_word(word)]
    place.check(bool(recipe))
    flags, others = take_flags(_in_pairs(words[len(recipe) :]))
    if not recipe:
        return _of_words(flags, others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of_recipe(recipe[0], flags, others, place)


def _in_pairs(words: Sequence[str]) -> list[str]:
    """Return words in which a flag has one value, and everything else is `name=value` or a file.

    Raises:
        OptionError: A flag does not exist; names the nearest.
    """
    found: list[str] = []
    left = list(words)
    while left:
        name, assigned, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            found.append(name + assigned + value)
            continue
        if not assigned:
            takes_pairs = bool(tuning_of(name.removeprefix("--").replace("-", "_")))
            values = [left.pop(0)] if left and takes_pairs and not left[0].startswith("--") else []
            while left and not is_word(left[0]):
                values.append(left.pop(0))
            value = ",".join(values) or "true"
        _check_flag(name)
        found += [f"{name}={value}"] if name in _FLAGS else [f"{name.removeprefix('--').replace('-', '_')}={value}"]
    return found


def _of_words(flags: Mapping[str, Any], words: Sequence[str]) -> Answer:
    """Resolve words beside no recipe; what only a recipe would tell is said."""
    for word in words:
        _check_name(word)
    files = [word for word in words if "=" not in word]
    for name in (name for file in files for name in names_in(Path(file), SECTIONS)):
        _check_name(f"{name}=")
    said = [word for word in words if "=" in word]
    options, written = normalize(files, flags, said)
    facts = written.facts
    check_options(options, facts)
    if (options.enabled or options.packed.enabled) and facts.te_rng_tracker is None:
        missing = f"{_TRACKER}=true is missing: training refuses graphs without it. bridge-cg train and presets set it"
        options = replace(options, warnings=(*options.warnings, missing))
    return Answer(options=options, notes=(*((_NO_FIGURES,) if options.vision.enabled else ()), *_switch_on(options)))


def _of_recipe(name: str, flags: Mapping[str, Any], words: Sequence[str], place: Place) -> Answer:
    require_bridge(name, " or write options alone")
    asked = without_imports()
    config = built(name, asked is not None)
    if place.graphs is not None:
        config = with_graphs(config, gpu=place.graphs)
    options = resolved(config, flags, [_of_the_model(word) for word in words], asked is not None)
    notes: list[str] = []
    layout = None
    if place.gpus is not None or hasattr(config, "train"):
        check_trainable(name, config, place.gpus)
    if place.gpus is not None:
        layout = divided(config.model, place.gpus)
        notes.append(layout_in_words(layout))
    if name not in RECIPES and _asks_upstream(built(name, asked is not None)):
        notes.append(_UPSTREAMS)
    unknown = [
        f"the sizes of {model} are on Hugging Face's hub only: what depends on its experts, dropout or kind of layers "
        "was not checked. bridge-cg train --dry-run checks it where the hub can be reached"
        for model in models.unknown(asked or ())
    ]
    return Answer(
        options=replace(options, warnings=(*options.warnings, *unknown)),
        encoder=encoder_of(getattr(config, "model", None)),
        has_audio=has_audio_encoder(getattr(config, "model", None)),
        forecast=vision_forecast(config, options.vision, place.graphs),
        language_model=language_forecast(config, options, place.graphs),
        step=whole_step(config, options, place.graphs, place.gpus),
        has_model=hasattr(config, "model"),
        layout=layout,
        notes=(*notes, *_switch_on(options)),
    )


def _switch_on(options: GraphOptions) -> tuple[str, ...]:
    """Return how to switch graphs on, where nobody chose to have them on or off."""
    return () if options.enabled or options.chosen else (_NO_GRAPHS,)


def _asks_upstream(config: Any) -> bool:
    """Whether a recipe as Bridge has it switches vision graphs on."""
    return getattr(getattr(config, "model", None), PROVIDER_FIELDS["impl"], None) not in (None, "none")


def _of_the_model(word: str) -> str:
    """Return a word whose field of the layout is one of the model, however it was written."""
    return f"model.{word}" if word.partition("=")[0] in _LAYOUT else word


def _check_flag(name: str) -> None:
    """Refuse a flag that does not exist.

    Raises:
        OptionError: Names the nearest.
    """
    if name not in _FLAGS and not _means_something(name.removeprefix("--").replace("-", "_")):
        raise unknown_flag(name, (*_FLAGS, *_OWN_FLAGS))


def _check_name(word: str) -> None:
    """Refuse a word that sets nothing that a configuration has.

    Raises:
        OptionError: Names the nearest.
    """
    name, assigned, _ = word.lstrip("+-").partition("=")
    if not assigned or _means_something(name.replace("-", "_")):
        return
    section, dot, field = name.rpartition(".")
    known = sorted(SECTIONS) if dot and section not in SECTIONS else (*FIELDS, *SETTINGS)
    wrong = section if dot and section not in SECTIONS else field
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    what = "section" if wrong == section else "option in docs/options.md"
    raise OptionError.unknown(name, what, near[0] if near else "")


def _means_something(name: str) -> bool:
    sections, field = split_name(name)
    known = field in (*FIELDS, *ATTRIBUTES, *SETTINGS, *OTHER_FIELDS, *_LAYOUT) or bool(tuning_of(field))
    # Upstream's sections have many more fields; one about graphs is this package's or in `OTHER_FIELDS`.
    return known if not sections else sections[0] in SECTIONS and (known or "graph" not in field)
