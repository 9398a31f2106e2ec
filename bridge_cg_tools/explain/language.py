"""What a language model gains from graphs of packed documents, by rates that were fitted to records."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options.language_model import MODULES, CudaGraphModule
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_tools.planner.cost import CostModel
from bridge_cg_tools.planner.rates import Errors, Rates, errors_of, language_model_rates, measured, scaled
from bridge_cg_tools.planner.shapes import LanguageModel, NotMeasured, Ranks, language_model_of, ranks_of

from .forecast import least_and_greatest, other_gpu, other_training
from .sizes import vocabulary_of

# Packs of as many tokens, of as many documents, as most records have.
SIZES, DOCUMENTS = (2048, 4096, 8192), 5
# Records that are farther than this from what is forecast for them support no forecast.
MOST_ERROR = 0.5
_PARTIAL = {CudaGraphModule.attn, CudaGraphModule.moe_router}
_OPTIONS = ("offload", "recompute", "offload_above_gb")


@dataclass(frozen=True, slots=True)
class PackRow:
    """One pack, forward and backward.

    Attributes:
        tokens, documents: Of the pack.
        eager_ms: Time eager; None where records do not support it.
        graphs_ms, memory_gb: Time on graphs; GiB of a slot whose largest bucket has these tokens.
    """

    tokens: int
    documents: int
    eager_ms: float | None
    graphs_ms: float
    memory_gb: float

    @property
    def ratio(self) -> float | None:
        """Time on graphs over time eager."""
        return None if self.eager_ms is None else self.graphs_ms / self.eager_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageForecast:
    """What to expect of packed graphs.

    Attributes:
        model: Its sizes; None where they are not known.
        ranks: How ranks share it.
        why_not: Why there are no figures; empty where there are some.
        rates: What they come from.
        errors: Of records that were left out of the fit, of this kind and layout.
        left_out: Of graphs of a model all of whose records were left out; None where there is one model only.
        rows: Packs.
        largest: Tokens of the largest bucket; None where it is not known.
        memory_gb: GiB of a slot with it.
        step: The measured step of this very model and layout.
    """

    model: LanguageModel | None
    ranks: Ranks
    why_not: tuple[str, ...] = ()
    rates: Rates
    errors: Errors | None = None
    left_out: float | None = None
    rows: tuple[PackRow, ...] = ()
    largest: int | None = None
    memory_gb: float | None = None
    step: Mapping[str, Any] | None = None

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The least and the greatest time on graphs over time eager."""
        return least_and_greatest(row.ratio for row in self.rows)


def language_forecast(config: Any, options: GraphOptions, gpu: str | None) -> LanguageForecast | None:
    """Return what to expect of a configuration's graphs of packed documents; None without such graphs.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpu: A key of `recipes.GPUS`; None takes the GPU that there are records of.
    """
    if not options.packed.enabled or options.language_model.impl == "none":
        return None
    rates, ranks = language_model_rates(), ranks_of(config.model)
    try:
        model = language_model_of(config.model, vocabulary_of(config))
    except NotMeasured as why:
        return LanguageForecast(model=None, ranks=ranks, why_not=(str(why),), rates=rates)
    step = measured_step(model, ranks, options.choice.setting, gpu)
    differs = [*other_gpu(rates.gpu, gpu), *other_training(config), *_other_options(options, model)]
    whole = not options.language_model.modules
    try:
        cost = scaled(model, ranks, rates, whole)
    except NotMeasured as why:
        differs.append(str(why))
    if differs:
        return LanguageForecast(model=model, ranks=ranks, why_not=tuple(differs), rates=rates, step=step)
    errors = errors_of(model, ranks, rates, whole)
    largest = _largest(config, options)
    sizes = [*(size for size in SIZES if largest is None or size < largest), *([largest] if largest else [])]
    least, most = rates.tokens
    rows = tuple(_row(cost, tokens, errors) for tokens in sizes if least <= tokens <= most)
    return LanguageForecast(
        model=model,
        ranks=ranks,
        rates=rates,
        errors=errors,
        left_out=rates.left_out[model.kind] if whole else None,
        rows=rows,
        largest=largest,
        memory_gb=next((row.memory_gb for row in rows if row.tokens == largest), None),
        step=step,
    )


def measured_step(model: LanguageModel, ranks: Ranks, setting: str | None, gpu: str | None) -> Mapping[str, Any] | None:
    """Return the measured step of a model, a layout, a setting and a GPU; None where there is none."""
    for step in measured()["steps"]:
        found = step["language_model"]
        same = found["model"] == asdict(model) and found["ranks"] == asdict(ranks) and step["setting"] == setting
        if same and not other_gpu(step["gpu"], gpu):
            return dict(step)
    return None


def _row(cost: CostModel, tokens: int, errors: Errors) -> PackRow:
    short, rest = divmod(tokens, DOCUMENTS)
    lengths = (*(short + 1,) * rest, *(short,) * (DOCUMENTS - rest))
    eager = cost.eager_ms(lengths) if errors.ratio <= MOST_ERROR else None
    graphs = cost.graph_ms(tokens, lengths, DOCUMENTS, max(lengths))
    return PackRow(tokens, DOCUMENTS, eager, graphs, cost.memory_gb(tokens))


def _largest(config: Any, options: GraphOptions) -> int | None:
    """Return the tokens of the largest bucket, as far as options and data say."""
    if options.packed.buckets != "auto":
        return max(options.packed.buckets)
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    size = getattr(specs, "packed_sequence_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _other_options(options: GraphOptions, model: LanguageModel) -> list[str]:
    packed, modules = options.packed, set(options.language_model.modules)
    held = {name: getattr(packed, name) for name in _OPTIONS}
    found = [f"{PACKED_FIELDS[name]}={value}" for name, value in held.items() if value not in (None, ())]
    if modules and not (model.kind == "experts" and modules == _PARTIAL):
        found.append(f"{MODULES}={sorted(module.name for module in modules)}")
    return [f"{text} was not measured" for text in [*found, *(["deterministic algorithms"] if deterministic() else [])]]


def as_json(found: LanguageForecast) -> dict[str, Any]:
    """Return a forecast as plain values: ms, GiB, and relative errors."""
    rates = found.rates
    return {
        "model": None if found.model is None else str(found.model),
        "source": {"files": list(rates.files), "date": rates.date, "gpu": rates.gpu},
        "errors": None if found.errors is None else {**asdict(found.errors), "model_left_out": found.left_out},
        "not_measured": list(found.why_not),
        "packs": [{**asdict(row), "ratio": row.ratio} for row in found.rows],
        "largest_bucket": found.largest,
        "memory_gb": found.memory_gb,
        "ratios": None if found.ratios is None else list(found.ratios),
        "step": found.step,
    }


def said(found: LanguageForecast) -> Sequence[str]:
    """Return the sentences about where figures come from and how far they are from records."""
    texts = []
    if found.errors is not None:
        texts.append(_source(found, found.errors))
    if found.step is not None:
        texts.append(_step(found.step))
    elif found.rows:
        texts += [_full_size(step) for step in measured()["steps"][:1]]
    if found.why_not:
        texts.append(f"No forecast of the language model: {'; '.join(found.why_not)}.")
    return texts


def _source(found: LanguageForecast, errors: Errors) -> str:
    memory = "; no record has the memory" if errors.memory is None else f", {errors.memory:.0%} (memory)"
    eager = f"{errors.eager:.0%} (eager), " if errors.ratio <= MOST_ERROR else ""
    ratio = f", {errors.ratio:.0%} (ratio)" if errors.ratio <= MOST_ERROR else ""
    text = (
        f"By rates fitted to {found.rates.source}, for its layers, widths and tokens. The {errors.records} records of "
        f"this kind, left out of the fit in turn, are within {eager}{errors.graphs:.0%} (graphs){ratio}{memory}"
    )
    text += "." if found.left_out is None else f"; whole models left out, within {found.left_out:.0%} (graphs)."
    if errors.ratio > MOST_ERROR:
        text += f" Eager has no forecast: its records are off by {errors.eager:.0%}."
    return text


def _full_size(step: Mapping[str, Any]) -> str:
    part = step["language_model"]
    forecast = part["forecast"]
    return (
        f"A full-size model that is not in the fit ({step['case']}) is forecast "
        f"{forecast['eager_ms'] / part['eager_ms'] - 1:+.0%} (eager), "
        f"{forecast['graphs_ms'] / part['graphs_ms'] - 1:+.0%} (graphs) and "
        f"{forecast['memory_gb'] / part['memory_gb'] - 1:+.0%} (memory) from what was measured."
    )


def _step(step: Mapping[str, Any]) -> str:
    part = step["language_model"]
    gpus = f"{step['gpus']} {step['gpu']}" + ("s" if step["gpus"] > 1 else "")
    return (
        f"Measured of this model and layout: a whole step takes {step['eager_ms']:.0f} ms eager and "
        f"{step['graphs_ms']:.0f} ms with cuda_graphs={step['setting']} "
        f"({step['graphs_ms'] / step['eager_ms']:.2f}); of it the language model, a pack of up to {part['tokens']} "
        f"tokens, {part['eager_ms']:.0f} and {part['graphs_ms']:.0f} ms, {part['memory_gb']:.1f} GiB a slot (forecast: "
        f"{part['forecast']['eager_ms']:.0f} and {part['forecast']['graphs_ms']:.0f} ms, "
        f"{part['forecast']['memory_gb']:.1f} GiB). {step['file']}, {step['date']}, {gpus}."
    )
