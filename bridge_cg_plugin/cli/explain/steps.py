"""Which measured whole step is of a configuration, or of the one nearest to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.cli.planner.records import (
    TOWER,
    LanguageModel,
    NotMeasured,
    Ranks,
    language_model_of,
    measured,
    other_ranks,
    ranks_of,
)
from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options.choice import SETTING
from bridge_cg_plugin.options.language_model import IMPL

from ..gpus import other_gpu
from .forecast import adapter_of, other_options, other_precision, other_vision_options, unlike
from .models import encoder_of

# Sizes of a language model by which it stays near to a measured one; all others must be equal.
_COUNTS = ("attention", "mlps", "expert_layers")
_TRAINED = {"freeze_vision_model": False, "freeze_language_model": False, "recompute_granularity": None}
# Values of `vision_cuda_graph_tuning.kernels`, by whether graphs round as eager does.
_KERNELS = {True: ("exact",), False: ("auto", "fast")}


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A measured step.

    Attributes:
        found: As `measured.json` has it.
        differs: What of the configuration it was not measured with, each as it is written.
    """

    found: Mapping[str, Any]
    differs: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it is of this very model, layout and options."""
        return not self.differs

    @property
    def ratio(self) -> float:
        """Time on graphs over that of the first eager run."""
        return float(self.found["graphs_ms"] / self.found["eager_runs_ms"][0])

    @property
    def ratios(self) -> tuple[float, float]:
        """The same over the slowest and over the fastest eager run."""
        runs, graphs = self.found["eager_runs_ms"], self.found["graphs_ms"]
        return graphs / max(runs), graphs / min(runs)

    @property
    def memory_gb(self) -> float:
        """GiB of the graphs of all parts."""
        return float(sum(self.found["memory_gb"].values()))


def whole_step(config: Any, options: GraphOptions, gpu: str | None, gpus: int | None) -> WholeStep | None:
    """Return the measured step that is nearest to a configuration; None where no record is of a model like it.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpu: A key of `recipes.GPUS`; None is not known.
        gpus: How many there are; None is not known.
    """
    if not options.vision.enabled or str(encoder_of(getattr(config, "model", None))) != TOWER:
        return None
    try:
        model = language_model_of(config.model)
    except NotMeasured:
        return None
    asked = _Asked(config, options, model, gpu, gpus)
    near = [step for step in measured()["steps"] if _is_near(step, asked)]
    steps = [WholeStep(step, tuple(dict.fromkeys(_differs(step, asked)))) for step in near]
    return min(steps, key=lambda step: len(step.differs), default=None)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A configuration, and the arguments of `whole_step`."""

    config: Any
    options: GraphOptions
    model: LanguageModel
    gpu: str | None
    gpus: int | None


def _is_near(step: Mapping[str, Any], asked: _Asked) -> bool:
    """Whether a step has the same kind of graphs, adapters and layers."""
    options = asked.options
    if step["impl"] != options.language_model.impl or step["adapter"] != adapter_of(asked.config):
        return False
    if step["model"] is None:
        return True
    alike = _widths(step["model"]) == _widths(asdict(asked.model))
    return alike and options.packed.enabled and options.choice.setting is not None


def _widths(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in model.items() if name not in _COUNTS}


def _differs(step: Mapping[str, Any], asked: _Asked) -> Iterator[str]:
    config, options = asked.config, asked.options
    if step["model"] is None:
        yield f"a language model of {asked.model}"
    elif step["model"] != asdict(asked.model):
        yield f"model.num_layers={config.model.num_layers}"
    yield from other_ranks(Ranks(**(step["ranks"] or {})), ranks_of(config.model))
    yield from other_gpu(step["gpu"], asked.gpu)
    if asked.gpus not in (None, step["gpus"]):
        yield f"{asked.gpus} GPUs"
    yield from unlike(config, _TRAINED)
    yield from other_precision(config)
    if step["setting"] not in (None, options.choice.setting):
        yield f"{SETTING}={options.choice.setting}"
    yield from other_vision_options(options.vision, _KERNELS[step["setting"] == "exact"])
    yield from other_options(options, ())


def as_json(step: WholeStep) -> dict[str, Any]:
    """Return a step as plain values: ms, GiB."""
    return {**step.found, "ratio": step.ratio, "ratios": list(step.ratios), "not_measured": list(step.differs)}


def said(step: WholeStep) -> str:
    """Return the sentences about a measured step."""
    found, runs = step.found, step.found["eager_runs_ms"]
    head = "Whole step, measured for this model and layout"
    if step.differs:
        head = f"Whole step: not measured with {', '.join(step.differs)}. The nearest"
    samples = f" of {found['samples']} samples" if found["samples"] else ""
    how = f"{SETTING}={found['setting']}" if found["setting"] else f"{IMPL}={found['impl']}"
    gpus = f"{found['gpus']} {found['gpu']}" + ("s" if found["gpus"] > 1 else "")
    return " ".join(
        [
            f"{head}: {found['of']}, on {gpus}. A step{samples} takes {runs[0]:.0f} ms eager and "
            f"{found['graphs_ms']:.0f} ms with {how} ({step.ratio:.2f}).",
            _host(step),
            *_parts(found),
            f"Graphs take {_memory(found)}. {found['file']}, {found['date']}.",
        ]
    )


def _host(step: WholeStep) -> str:
    """Return what to think of eager's time."""
    runs = step.found["eager_runs_ms"]
    if len(runs) == 1:
        return "Eager's time depends on the host, and it was timed once."
    least, greatest = (f"{ratio:.2f}" for ratio in step.ratios)
    return f"Eager's time depends on the host: its {len(runs)} runs took {_range(runs)} ms ({least} to {greatest})."


def _parts(found: Mapping[str, Any]) -> Iterator[str]:
    if found["parts_ms"]:
        times = (
            f"{part} {_range(ms['eager_runs'])} ms eager and {ms['graphs']:.0f} ms on graphs"
            for part, ms in found["parts_ms"].items()
        )
        waits = ", waits for other ranks included" if found["gpus"] > 1 else ""
        yield f"GPU time of a rank{waits}: {', '.join(times)}."


def _memory(found: Mapping[str, Any]) -> str:
    return " and ".join(f"{gb:.1f} GiB ({part})" for part, gb in found["memory_gb"].items())


def _range(values: Sequence[float]) -> str:
    least, greatest = (f"{value:.0f}" for value in (min(values), max(values)))
    return least if least == greatest else f"{least} to {greatest}"
