"""The command `bridge-cg explain`."""

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bridge_cg_plugin.options import GraphOptions, OptionError, check_options, normalize
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.explain import HEAD, WIDTHS, text_table
from bridge_cg_plugin.options.flags import FLAGS, as_typed, take_flags, unknown_flag
from bridge_cg_plugin.options.graph_options import VISION_ENCODER, split_name, tuning_of
from bridge_cg_plugin.options.sources import ATTRIBUTES, FIELDS, OTHER_FIELDS, SETTINGS, is_word
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.recipes import GPUS, with_graphs
from bridge_cg_plugin.upstream.seams.encoders import NO_ADAPTER, encoder_of, has_audio_encoder

from ..answers import Tell, between, table, wrapped
from ..checks import add_counts, check_fit, divided, layout_in_words
from ..measured import Forecast, WholeStep, language_forecast, vision_forecast, whole_step
from . import models
from .recipes import built, require_bridge, resolved, without_imports
from .start import check_training

_TRACKER = "rng.te_rng_tracker"
_NO_FIGURES = "Times and memory depend on the encoder: write a recipe's name first."
_NO_GRAPHS = "No graphs are on. Add cuda_graphs=exact to see what can run on them."
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
        if not self.options.vision.enabled:
            return Line(AUDIO_ENCODER, "eager", f"{PROVIDER_FIELDS['impl']}=none")
        why = "one graph per bucket over the whole encoder; buckets captured on demand"
        return Line(AUDIO_ENCODER, "graphs", why, NOT_MEASURED, NOT_MEASURED)

    def _line(self, part: wording.Part) -> Line:
        line = Line(part.name, part.runs, part.why, options=part.options)
        encoder = part.name == VISION_ENCODER
        if encoder and self.has_model and self.forecast is None:
            if NO_ADAPTER in self.encoder:
                return replace(line, runs="eager", why="no adapter for it is known")
            return replace(line, runs="none", why="the model has none that graphs support")
        found = self.forecast if encoder else self.language_model
        if part.runs != "graphs" or (encoder and found is None):
            return line
        if found is None or not found.holds or found.ratios is None:
            return replace(line, memory=NOT_MEASURED, ratio=NOT_MEASURED)
        memory = NOT_MEASURED if found.memory_gb is None else f"{found.memory_gb:.1f} GiB"
        return replace(line, memory=wording.BY_SIZE if found.largest is None else memory, ratio=between(found.ratios))


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
    parser.add_argument("input", nargs="*", help="a recipe's name, a YAML file, name=value or a flag of an option")
    parser.add_argument("--graphs", choices=tuple(GPUS), help="graphs within this GPU's limits, on the recipe")
    add_counts(parser, "machines; the layout and the batch must fit all GPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(given: Sequence[str], tell: Tell) -> int:
    """Print what a command line resolves to; returns 2 if it is refused, else 0.

    Args:
        given: A recipe's name, what is written beside it, and flags.
        tell: Prints the answer.
    """
    try:
        answer = look(given)
    except (OptionError, RuntimeError) as error:
        print(as_typed(error, given), file=sys.stderr)
        return 2
    tell(json.dumps(as_json(answer)) if "--json" in given else render(answer))
    return 0


def look(given: Sequence[str]) -> Answer:
    """Return what a command line resolves to, checked as training does, and what to expect of it.

    Args:
        given: A recipe's name, what is written beside it, and flags.

    Raises:
        OptionError: Training would refuse it, or a word means nothing.
    """
    flags, words = take_flags(given)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    parsed, rest = parser.parse_known_intermixed_args(words)
    for word in rest:
        known = [spelling for flag in FLAGS for spelling in flag.spellings]
        raise unknown_flag(word, [*known, *(f"--{name}" for name in vars(parsed))])
    words = parsed.input
    if not words or is_word(words[0]):
        for name in ("graphs", "nodes", "gpus_per_node"):
            if getattr(parsed, name) is not None:
                raise OptionError.because(name, f"Cannot use --{name} without a recipe. Write a recipe's name first.")
        return _of_words(flags, words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of_recipe(words[0], flags, words[1:], parsed)


def _of_words(flags: Mapping[str, Any], words: Sequence[str]) -> Answer:
    """Resolve words beside no recipe; what only a recipe would tell is said."""
    said = [word for word in words if "=" in word]
    for word in said:
        _check_name(word)
    options, written = normalize([word for word in words if "=" not in word], flags, said)
    facts = written.facts
    check_options(options, facts)
    if (options.enabled or options.packed.enabled) and facts.te_rng_tracker is None:
        missing = f"{_TRACKER}=true is missing: training refuses graphs without it. bridge-cg train and presets set it"
        options = replace(options, warnings=(*options.warnings, missing))
    return Answer(options=options, notes=(*((_NO_FIGURES,) if options.vision.enabled else ()), *_switch_on(options)))


def _of_recipe(name: str, flags: Mapping[str, Any], words: Sequence[str], place: argparse.Namespace) -> Answer:
    require_bridge(name, " or write options alone")
    without_imports()
    config = built(name)
    if place.graphs is not None:
        config = with_graphs(config, gpu=place.graphs)
    options = resolved(config, flags, words)
    gpus = None if place.nodes is place.gpus_per_node is None else (place.nodes or 1) * (place.gpus_per_node or 1)
    if hasattr(config, "train"):
        check_fit(config, gpus)
        check_training(name, config, options, gpus, place.graphs)
    layout = None if gpus is None else divided(config.model, gpus)
    unknown = [
        f"the sizes of {model} are on Hugging Face's hub only: what depends on its experts, dropout or kind of layers "
        "was not checked. bridge-cg train --dry-run checks it where the hub can be reached"
        for model in models.unknown()
    ]
    return Answer(
        options=replace(options, warnings=(*options.warnings, *unknown)),
        encoder=encoder_of(getattr(config, "model", None)),
        has_audio=has_audio_encoder(getattr(config, "model", None)),
        forecast=vision_forecast(config, options.vision, place.graphs),
        language_model=language_forecast(config, options, place.graphs),
        step=whole_step(config, options, place.graphs, gpus),
        has_model=hasattr(config, "model"),
        layout=layout,
        notes=(*([] if layout is None else [layout_in_words(layout)]), *_switch_on(options)),
    )


def _switch_on(options: GraphOptions) -> tuple[str, ...]:
    """Return how to switch graphs on, where nobody chose to have them on or off."""
    return () if options.enabled or options.chosen else (_NO_GRAPHS,)


def _check_name(word: str) -> None:
    """Refuse a word that sets nothing that a configuration has; upstream's sections have fields of their own.

    Raises:
        OptionError: Names the nearest.
    """
    sections, field = split_name(word.lstrip("+").partition("=")[0].replace("-", "_"))
    known = field in (*FIELDS, *ATTRIBUTES, *SETTINGS, *OTHER_FIELDS) or tuning_of(field)
    if known or (sections and "graph" not in field):
        return
    near = difflib.get_close_matches(field, (*FIELDS, *SETTINGS), n=1, cutoff=0.4)
    raise OptionError.unknown(field, "option in docs/options.md", near[0] if near else "")
