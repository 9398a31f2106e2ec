"""What `bridge-cg explain` found: the options, what they mean for each part, and what to expect."""

from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.choice import LANGUAGE_MODEL_PART, VISION_ENCODER
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.known_encoders import NO_ADAPTER

from .forecast import Forecast
from .forecast import as_json as forecast_as_json
from .steps import WholeStep
from .steps import as_json as step_as_json

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
