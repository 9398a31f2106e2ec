"""The command `bridge-cg explain`."""

import argparse
import contextlib
import copy
import difflib
import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bridge_cg_plugin.options import GraphOptions, OptionError, check_options, normalize
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.declaration import GONE
from bridge_cg_plugin.options.facts import LOOP_PARTS
from bridge_cg_plugin.options.flags import take_flags
from bridge_cg_plugin.options.graph_options import LANGUAGE_MODEL_PART, SETTING, VISION_ENCODER
from bridge_cg_plugin.options.sources import FIELDS, OTHER_FIELDS, SETTINGS, refuse_unknown
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.recipes import GPUS, PRESETS, with_graphs
from bridge_cg_plugin.upstream.hooks.recipes import recipe_names
from bridge_cg_plugin.upstream.seams.encoders import NO_ADAPTER, encoder_of, has_audio_encoder

from ..answers import AnswerError, Tell, table, wrapped
from ..checks import add_counts, check_fit, divided, layout_in_words, recipe_in, refuse_flags
from ..measured import Nearest, nearest
from . import models
from .recipes import built, require_bridge, resolved, without_imports
from .start import check_training

_TRACKER = "rng.te_rng_tracker"
_NO_FIGURES = "Times and memory depend on the model: write a recipe's name first."
_NO_GRAPHS = "cuda_graphs=exact"
_RECOMPUTE = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1, on graphs"
AUDIO_ENCODER = "audio encoder"
NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer.

    Attributes:
        options: What the words resolve to, checked as training does.
        encoder: The vision encoder of the recipe's model in words; empty without one.
        has_audio: Whether the model has an audio encoder that graphs take.
        has_encoder: Whether the model has a vision encoder that graphs support; None without a recipe.
        unknown: Why it is not known whether the language model can run on graphs; empty where it is.
        nearest: What was measured that is nearest, with `cuda_graphs=exact` where nobody chose; None without graphs.
        gpu: The GPU that was named.
        lighter: What precedes recompute where the memory of `gpu` does not suffice: a preset for it, if there is one.
        layout: Over how many GPUs each field divides the model, and the replicas; empty where nobody said.
        notes: Sentences for a person.
    """

    options: GraphOptions
    encoder: str = ""
    has_audio: bool = False
    has_encoder: bool | None = None
    unknown: str = ""
    nearest: Nearest | None = None
    gpu: str | None = None
    lighter: str = ""
    layout: dict[str, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[wording.Part, ...]:
        """What becomes of each part of the model."""
        vision, language = (self._part(part) for part in wording.parts(self.options))
        if not self.has_audio:
            return vision, language
        captured = "one graph per bucket over the whole encoder; buckets captured on demand"
        runs = ("graphs", captured) if self.options.vision.enabled else ("eager", f"{PROVIDER_FIELDS['impl']}=none")
        return vision, wording.Part(AUDIO_ENCODER, *runs), language

    def _part(self, part: wording.Part) -> wording.Part:
        if part.name != VISION_ENCODER:
            return replace(part, runs=NOT_KNOWN, why=self.unknown) if self.unknown and part.runs == "graphs" else part
        if self.has_encoder is not False:
            return part
        if NO_ADAPTER in self.encoder:
            return replace(part, runs="eager", why="no adapter for it is known")
        return replace(part, runs="none", why="the model has none that graphs support")

    @property
    def summary(self) -> dict[str, str]:
        """What a user asks first, in words."""
        lines = [line for line in self.lines if line.runs != "none"]
        on = ", ".join(self._on_graphs(line) for line in lines if line.runs == "graphs")
        others = [f"{line.name} {line.runs}: {line.why}" for line in lines if line.runs != "graphs"]
        found = self.nearest if any(line.runs in ("graphs", NOT_KNOWN) for line in lines) else None
        return {
            "on graphs": "; ".join([on or "nothing", *others]),
            "time a step": "eager's" if found is None else found.time(),
            "peak memory": "eager's" if found is None else found.memory(),
            "fits": "not measured: nothing is on graphs" if found is None else found.fits(self.gpu),
            "would bring most": self._most(lines),
        }

    def _on_graphs(self, line: wording.Part) -> str:
        named = self.options.language_model.modules or self.options.padded_parts
        modules = line.name == LANGUAGE_MODEL_PART and named
        captured = line.why.partition("; ")[0]
        return f"{line.name} in part ({captured})" if modules or self._rest(line) else line.name

    def _rest(self, line: wording.Part) -> str:
        """Return why a part on graphs is not wholly there; empty where nobody chose what is."""
        return next((part.why for part in self.options.chosen if part.name == line.name), "")

    def _most(self, lines: Sequence[wording.Part]) -> str:
        if not _asks(self.options):
            return _NO_GRAPHS if self.nearest is None else f"{_NO_GRAPHS}: {self.nearest.time()}"
        if any(line.runs == NOT_KNOWN for line in lines):
            return "not known: see the first line"
        if self.nearest and self.nearest.exceeds(self.gpu):
            return f"less memory on {self.gpu}: {self.lighter}{_RECOMPUTE}"
        if eager := [line for line in lines if line.runs == "eager"]:
            return f"the {eager[-1].name} on graphs, which this keeps eager: {eager[-1].why}"
        if rest := [line for line in lines if self._rest(line)]:
            return f"the rest of the {rest[-1].name} on graphs: {self._rest(rest[-1])}"
        return (self.nearest and self.nearest.faster()) or "nothing that was measured: all parts are on graphs"


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain values."""
    return {
        "summary": None if answer.has_encoder is None else answer.summary,
        "encoder": answer.encoder,
        **wording.as_json(answer.options),
        "table": [{"part": line.name, **asdict(line)} for line in answer.lines],
        "nearest": None if answer.nearest is None else answer.nearest.as_json(),
        "layout": answer.layout,
        "notes": list(answer.notes),
    }


def render(answer: Answer, details: bool = False) -> str:
    """Return an answer as lines for a person: of a recipe first what a user asks."""
    lines = [f"{name}: {text}" for name, text in answer.summary.items()] if answer.has_encoder is not None else []
    lines += ["", *_details(answer)] if lines and details else []
    lines += _details(answer) if answer.has_encoder is None else []
    lines += [*answer.notes, *(f"warning: {text}" for text in answer.options.warnings)]
    lines += [] if details or answer.has_encoder is None else ["--details shows what is captured, options and records"]
    return "\n".join(wrapped(*lines))


def _details(answer: Answer) -> list[str]:
    rows = [(line.name, line.runs, line.why) for line in answer.lines]
    options = [option for line in answer.lines for option in line.options]
    lines = table([("part", "runs", "why"), *rows])
    lines += [f"options: {' '.join(options)}"] if options else []
    lines += [f"vision encoder: {answer.encoder}"] if answer.encoder else []
    if answer.nearest is not None and answer.nearest.differs:
        lines.append(f"not measured here: {', '.join(answer.nearest.differs)}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("input", nargs="*", help="a recipe's name, a YAML file, name=value or a flag of an option")
    parser.add_argument("--recipe", metavar="NAME", help="the recipe, in place of its name alone")
    kinds: dict[str, Any] = {"type": str.lower, "choices": tuple(GPUS)}
    parser.add_argument("--graphs", **kinds, help="graphs within this GPU's limits, on the recipe")
    parser.add_argument("--gpu", **kinds, help="whether the step fits this GPU; that of --graphs if left out")
    parser.add_argument("--details", action="store_true", help="also what is captured, options and records")
    add_counts(parser, "machines; the layout and the batch must fit all GPUs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(given: Sequence[str], tell: Tell) -> int:
    """Print what a command line resolves to; returns the exit status.

    Args:
        given: A recipe's name, what is written beside it, and flags.
        tell: Prints the answer.
    """
    try:
        answer = look(given)
    except RuntimeError as error:  # of a recipe
        raise AnswerError(str(error)) from error
    tell(json.dumps(as_json(answer)) if "--json" in given else render(answer, "--details" in given))
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
    refuse_flags(rest, parsed)
    recipe, words = recipe_in(parsed.recipe, parsed.input)
    if recipe is None:
        for name in ("graphs", "gpu", "nodes", "gpus_per_node"):
            if getattr(parsed, name) is not None:
                raise OptionError.because(name, f"Cannot use --{name} without a recipe. Write a recipe's name first.")
        bridges = as_bridges(words, parsed, (*FIELDS, *SETTINGS))[0]
        return _of_words({**flags, **({} if bridges == words else {LOOP_PARTS: wording.PARTS})}, bridges)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of_recipe(recipe, flags, words, parsed)


def _of_words(flags: Mapping[str, Any], words: Sequence[str]) -> Answer:
    """Resolve words beside no recipe; what only a recipe would tell is said."""
    said = [word for word in words if "=" in word]
    for word in said:
        name, _, value = word.lstrip("+").partition("=")
        *sections, field = name.replace("-", "_").split(".")
        if field not in OTHER_FIELDS and (not sections or "graph" in field):  # upstream's sections have others
            refuse_unknown(field, value)
    options, written = normalize([word for word in words if "=" not in word], flags, said)
    facts = written.facts
    check_options(options, facts)
    if (options.enabled or options.packed.enabled) and facts.te_rng_tracker is None:
        missing = f"{_TRACKER}=true is missing: training refuses graphs without it. bridge-cg train and presets set it"
        options = replace(options, warnings=(*options.warnings, missing))
    return Answer(options=options, notes=(_NO_FIGURES,))


def _of_recipe(name: str, flags: Mapping[str, Any], words: Sequence[str], place: argparse.Namespace) -> Answer:
    require_bridge(name, " or write options alone")
    without_imports()
    config, gpu = built(name), place.gpu or place.graphs
    if place.graphs is not None:
        config = with_graphs(config, gpu=place.graphs)
    fields = {*getattr(getattr(config, "model", None), "__dict__", ()), *FIELDS}
    bridges, others = as_bridges(words, place, fields)
    other_loop = bridges != list(words)
    if other_loop and hasattr(config, "model"):
        setattr(config.model, LOOP_PARTS, wording.PARTS)
    options = resolved(config, flags, bridges)
    gpus = None if place.nodes is place.gpus_per_node is None else (place.nodes or 1) * (place.gpus_per_node or 1)
    if hasattr(config, "train"):
        check_fit(config, gpus)
        if not other_loop:  # such a loop has checks of its own
            check_training(name, built(name), config, options, gpus, gpu)
    unknown = models.unknown()
    reasons = [f"the sizes of {' and '.join(unknown)} are on Hugging Face's hub only"] if unknown else []
    if hasattr(getattr(config, "model", None), "_stands_in"):
        reasons.append("the model is built by code that is not run here")
    said = f"{' and '.join(reasons)}, so training's checks of it were not made"
    layout = None if gpus is None else divided(config.model, gpus)
    model, found = getattr(config, "model", None), None
    base = next((one.base for one in PRESETS if one.name == name), name)
    lighter = [one.name for one in PRESETS if one.fields and (one.base, one.gpu) == (base, gpu)]
    if model is not None:
        found = nearest(config, options if _asks(options) else _with_all(config), gpu, gpus)
    return Answer(
        options=options,
        encoder=encoder_of(model),
        has_audio=has_audio_encoder(model),
        has_encoder=models.encoder_of(model) is not None,
        unknown=f"{said}. bridge-cg train --dry-run makes them where the hub can be reached" if reasons else "",
        nearest=found,
        gpu=gpu,
        lighter="".join(f"the preset {one}, or " for one in {*lighter} & recipe_names()) if lighter else "",
        layout=layout,
        notes=(
            *([] if layout is None else [layout_in_words(layout)]),
            *([f"Words of another loop that say nothing of graphs: {', '.join(others)}."] if others else []),
        ),
    )


def _asks(options: GraphOptions) -> bool:
    """Return whether anybody asked for graphs, also where none can be."""
    chosen = options.chosen and options.choice.setting != "off"
    return bool(options.enabled or options.packed.enabled or chosen)


def _with_all(config: Any) -> GraphOptions:
    """Return the options of a configuration with every graph that it can have."""
    with contextlib.suppress(OptionError):
        return resolved(copy.deepcopy(config), {SETTING: "exact"})
    return GraphOptions()


# Words of verl's and NeMo-RL's command lines.
_MODEL = re.compile(
    r"\+*(?:actor_rollout_ref\.actor\.megatron(?:\.override_transformer_config)?|policy\.megatron_cfg)"
    r"\.([\w.]+)=(.*)",
    re.DOTALL,
)
_OTHERS = (
    *("actor_rollout_ref", "algorithm", "critic", "cluster", "data"),
    *("grpo", "loss_fn", "policy", "reward", "trainer"),
)
_PLACES = {
    **dict.fromkeys(("trainer.nnodes", "cluster.num_nodes"), "nodes"),
    **dict.fromkeys(("trainer.n_gpus_per_node", "cluster.gpus_per_node"), "gpus_per_node"),
}


def as_bridges(words: Sequence[str], place: argparse.Namespace, fields: Collection[str]) -> tuple[list[str], list[str]]:
    """Return words with those of other loops in Bridge's spelling, and the words that say nothing of graphs.

    Args:
        words: Of a command line.
        place: Gets what words say of machines and GPUs.
        fields: What the model has; a name that is nearly one of them is taken for a misspelt one.
    """
    found, left = [], []
    for word in words:
        name, _, value = word.lstrip("+~").partition("=")
        if name in _PLACES and value.isdecimal():
            setattr(place, _PLACES[name], int(value))
        elif (match := _MODEL.fullmatch(word)) and difflib.get_close_matches(
            match[1].partition(".")[0], (*fields, *GONE), 1, 0.9
        ):
            found.append(f"model.{match[1]}={match[2]}")
        elif name.partition(".")[0] in _OTHERS:
            left.append(name)
        else:
            found.append(word)
    return found, left
