"""What a language model gains from graphs of packed documents, by rates that were fitted to records."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.rates import Errors, Rates, errors_of, language_model_rates, measured, scaled
from bridge_cg_plugin.cli.planner.shapes import LanguageModel, NotMeasured, Ranks, language_model_of, ranks_of
from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options.language_model import MODULES, CudaGraphModule
from bridge_cg_plugin.options.packed import PACKED_FIELDS

from ..gpus import other_gpu
from .forecast import least_and_greatest, other_training
from .sizes import vocabulary_of

# Packs of as many tokens, of as many documents, as most records have.
SIZES, DOCUMENTS = (2048, 4096, 8192), 5
# Records that are farther than this from what is forecast for them support no forecast.
MOST_ERROR = 0.5
_PARTIAL = (CudaGraphModule.attn, CudaGraphModule.moe_router)
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
    others = [
        f"{text} was not measured" for text in other_options(options, _PARTIAL if model.kind == "experts" else ())
    ]
    differs = [*other_gpu(rates.gpu, gpu), *other_training(config), *others]
    whole = not options.language_model.modules
    try:
        cost = scaled(model, ranks, rates, whole)
    except NotMeasured as why:
        differs.append(str(why))
    if differs:
        return LanguageForecast(model=model, ranks=ranks, why_not=tuple(differs), rates=rates)
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
    )


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


def other_options(options: GraphOptions, measured_modules: Collection[CudaGraphModule]) -> list[str]:
    """Return the options that were not measured, each as it is written.

    Args:
        options: All graph options.
        measured_modules: Values of `cuda_graph_modules` that were, besides none.
    """
    packed, modules = options.packed, options.language_model.modules
    held = {name: getattr(packed, name) for name in _OPTIONS}
    found = [f"{PACKED_FIELDS[name]}={value}" for name, value in held.items() if value not in (None, ())]
    if modules and set(modules) != set(measured_modules):
        found.append(f"{MODULES}={sorted(module.name for module in modules)}")
    return [*found, *(["deterministic algorithms"] if deterministic() else [])]


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
    }


def said(found: LanguageForecast) -> Sequence[str]:
    """Return the sentences about where figures come from and how far they are from records."""
    texts = []
    if found.errors is not None:
        texts.append(_source(found, found.errors))
    if found.rows:
        texts.append(_full_size(found))
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


def _full_size(found: LanguageForecast) -> str:
    """Return how far the forecast of a full-size model is from what was measured: of this one, if it was."""
    steps = [step for step in measured()["steps"] if step["pack"]]
    same = [
        step
        for step in steps
        if found.model and step["model"] == asdict(found.model) and step["ranks"] == asdict(found.ranks)
    ]
    step = (same or steps)[0]
    pack, forecast = step["pack"], step["pack"]["forecast"]
    return (
        f"{'This' if same else 'A full-size'} model, not in the fit ({step['case']}), is forecast "
        f"{forecast['eager_ms'] / pack['eager_ms'] - 1:+.0%} (eager), "
        f"{forecast['graphs_ms'] / pack['graphs_ms'] - 1:+.0%} (graphs) and "
        f"{forecast['memory_gb'] / pack['memory_gb'] - 1:+.0%} (memory) from what was measured."
    )
