"""What `bridge-cg explain` found: the options, what they mean for each part, and what to expect."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.cli.answers import wrapped
from bridge_cg_plugin.cli.planner.records import Row
from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.choice import LANGUAGE_MODEL_PART, VISION_ENCODER
from bridge_cg_plugin.options.explain import HEAD, WIDTHS, text_table
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.encoders import NO_ADAPTER

from .forecast import Forecast, said
from .forecast import as_json as forecast_as_json
from .steps import WholeStep
from .steps import as_json as step_as_json
from .steps import said as said_of_step

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
            memory = f"{self.step.memory_gb:.1f} GiB"
            why = f"measured: {self.step.found['case']}"
            found.append(Line("whole step", "graphs", why, memory, _between(self.step.ratios)))
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
    if not found.holds:
        return NOT_MEASURED, NOT_MEASURED
    memory = NOT_MEASURED if found.memory_gb is None else f"{found.memory_gb:.1f} GiB"
    return wording.BY_SIZE if found.largest is None else memory, _between(found.ratios)


def _between(ratios: tuple[float, float] | None) -> str:
    if ratios is None:
        return NOT_MEASURED
    least, greatest = (f"{ratio:.2f}" for ratio in ratios)
    return least if least == greatest else f"{least}-{greatest}"


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as plain values."""
    found = answer.forecast
    return {
        "encoder": answer.encoder,
        **wording.as_json(answer.options),
        "table": [asdict(line) for line in answer.lines],
        "forecast": None if found is None else forecast_as_json(found),
        "language_model_forecast": None if answer.language_model is None else forecast_as_json(answer.language_model),
        "whole_step": None if answer.step is None else step_as_json(answer.step),
        "layout": answer.layout,
        "notes": list(answer.notes),
    }


_HEAD, _COLUMNS = (*HEAD, "time/eager", "why"), (*WIDTHS, 10, 34)
_HEADS = ("case", "tokens", "eager ms", "graphs ms", "ratio", "GiB a slot")
_FIGURES = (26, 8, 10, 11, 7, 12)


def render(answer: Answer) -> str:
    """Return an answer as lines for a person."""
    encoder = [f"vision encoder: {answer.encoder}"] if answer.encoder else []
    blocks = [_parts(answer.lines), _options(answer.lines), encoder]
    blocks += [_forecast(found) for found in (answer.forecast, answer.language_model) if found is not None]
    if answer.step is not None:
        blocks.append(["", said_of_step(answer.step)])
    blocks.append([*answer.notes, *(f"warning: {text}" for text in answer.options.warnings)])
    return "\n".join(line for block in blocks for text in block for line in wrapped(text))


def _parts(lines: Sequence[Line]) -> list[str]:
    rows = [_HEAD, *((line.part, line.runs, line.memory, line.ratio, line.why) for line in lines)]
    return text_table(rows, _COLUMNS)


def _options(lines: Sequence[Line]) -> list[str]:
    options = [option for line in lines for option in line.options]
    return [f"options: {' '.join(options)}"] if options else []


def _forecast(found: Forecast) -> list[str]:
    if not found.measured:
        return ["", *said(found)]
    if found.same is None:
        models = " and ".join(dict.fromkeys(each.of for each in found.measured))
        title = f"{found.of} was not measured. The nearest, forward and backward of a microbatch: {models}"
    else:
        title = f"{found.of}, forward and backward of a microbatch"
    rows = [_HEADS, *(_figures(row) for row in found.rows)]
    table = ["".join(_cells(row)) for row in rows]
    return ["", f"{title}:", *table, *said(found)]


def _cells(row: Sequence[str]) -> Iterator[str]:
    yield row[0].ljust(_FIGURES[0])
    yield from (cell.rjust(width) for cell, width in zip(row[1:], _FIGURES[1:], strict=True))


def _figures(row: Row) -> tuple[str, ...]:
    memory = "-" if row.memory_gb is None else f"{row.memory_gb:.1f}"
    return (row.case, str(row.tokens), f"{row.eager_ms:.1f}", f"{row.graphs_ms:.1f}", f"{row.ratio:.2f}", memory)
