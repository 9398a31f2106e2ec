"""What a vision encoder gains from graphs, by what was measured, and where a configuration differs from that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.images import Image
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from ..gpus import other_gpu
from .encoders import Encoder, Measured, Row, encoder_of, measured_of
from .processors import processor_of

# Patches of an image of 448 x 448 pixels, of one of 768 x 768, and of a large one.
SIZES = (784, 2304, 8192)
# Part of `vision_cuda_graph_buckets_max_gb` that buckets take.
FILLED = 0.8
# Fields of the model and options of vision graphs that figures depend on, by the values that were measured.
_MODEL = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "freeze_vision_model": False}
_LANGUAGE_MODEL = {"freeze_language_model": False, "recompute_granularity": None}
_PRECISION = "bf16_mixed"
_OPTIONS = {
    "offload": (None, ()),
    "recompute": (None, ()),
    "offload_above_gb": (None,),
    "streams": ("auto",),
    "gradient_accumulation_fusion": (True,),
    "gradient_hooks": ("awaited",),
}
# Values of `vision_cuda_graph_tuning.attention` by which encoders of Transformer Engine attend as they do by default.
BY_CUDNN = ("auto", "cudnn")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of an encoder's graphs.

    Attributes:
        encoder: The model's.
        measured: What was measured of it; None where nothing was.
        rows: Microbatches, forward and backward.
        differs: What of this configuration was not measured, each as it is written.
        largest: Tokens of the largest bucket that can be captured; None without graphs or a limit.
        memory_gb: GiB of a slot with that bucket; None where there is none or it was not measured.
    """

    encoder: Encoder
    measured: Measured | None
    rows: tuple[Row, ...] = ()
    differs: tuple[str, ...] = ()
    largest: int | None = None
    memory_gb: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the figures are of this very configuration."""
        return self.measured is not None and not self.differs

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The least and the greatest time on graphs over time eager."""
        return least_and_greatest(row.ratio for row in self.rows)


def least_and_greatest(ratios: Iterable[float | None]) -> tuple[float, float] | None:
    """Return the least and the greatest of the ratios that are known; None without one."""
    found = [ratio for ratio in ratios if ratio is not None]
    return (min(found), max(found)) if found else None


def forecast(config: Any, options: VisionGraphOptions, gpu: str | None) -> Forecast | None:
    """Return what to expect of a configuration's vision graphs; None for a model that has no encoder for them.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its vision graphs.
        gpu: A key of `recipes.GPUS`; None takes the GPU that there are records of.
    """
    encoder = encoder_of(getattr(config, "model", None))
    measured = None if encoder is None else measured_of(encoder, options.kernels)
    if encoder is None or measured is None:
        return None if encoder is None else Forecast(encoder, None)
    differs = (*other_gpu(measured.gpu, gpu), *differences(config, options, measured.kernels, measured.attention))
    if measured.cost is None:
        largest = largest_bucket(options, None)
        found = {row.tokens: row.memory_gb for row in measured.rows}
        return Forecast(encoder, measured, measured.rows, differs, largest, found.get(largest or 0))
    largest = largest_bucket(options, measured.cost)
    rows = tuple(_row(measured, frames, largest) for frames in microbatches(config, encoder))
    if not any(row.ratio for row in rows):
        rows = (*rows, *(_row(measured, (tokens,), largest) for tokens in usual_sizes(largest)))
    memory = None if largest is None else _row(measured, (largest,), largest).memory_gb
    return Forecast(encoder, measured, rows, differs, largest, memory)


def microbatches(config: Any, encoder: Encoder) -> list[tuple[int, ...]]:
    """Return the patches of a microbatch's images where the data's configuration has their sizes, else nothing.

    Args:
        config: A Bridge `ConfigContainer`.
        encoder: Its model's, of a kind whose patches are known.
    """
    dataset = getattr(config, "dataset", None)
    size, images = getattr(dataset, "image_size", None), getattr(dataset, "num_images", 0)
    if not (size and images):
        return []
    width, height = size
    patches = Image(int(width), int(height)).segments(processor_of(config, encoder))
    return [patches * images * (config.train.micro_batch_size or 1)]


def usual_sizes(largest: int | None) -> list[int]:
    """Return the patches of usual images, and of the largest bucket.

    Args:
        largest: Tokens of the largest bucket; None where there is no limit.
    """
    sizes = [tokens for tokens in SIZES if largest is None or tokens < largest]
    return [*sizes, *([largest] if largest else [])]


def largest_bucket(options: VisionGraphOptions, cost: CostModel | None) -> int | None:
    """Return the tokens of the largest bucket that options allow; None without graphs or a limit.

    Args:
        options: Of vision graphs.
        cost: Tells how many tokens a limit of memory holds; None leaves that limit out.
    """
    if not options.enabled:
        return None
    if options.buckets != "auto":
        return max(*options.buckets, options.max_seq_length or 0, 1)
    limits = [options.max_seq_length] if options.max_seq_length else []
    if options.buckets_max_gb is not None and cost is not None:
        limits.append(cost.tokens_within(options.buckets_max_gb * FILLED))
    return min(limits, default=None)


def _row(measured: Measured, frames: Sequence[int], largest: int | None) -> Row:
    tokens, cost, fit = sum(frames), measured.cost, measured.fit
    if cost is None or fit is None:
        raise ValueError("rows are forecast by a cost model")
    least, most = fit.tokens
    if not least <= tokens <= most:
        return Row(tokens, len(frames), note=f"measured from {least} to {most} tokens only")
    if largest is not None and tokens > largest:
        return Row(tokens, len(frames), cost.eager_ms(frames), note=f"runs eager: the largest bucket has {largest}")
    graphs = cost.graph_ms(tokens, frames, len(frames), max(frames))
    return Row(tokens, len(frames), cost.eager_ms(frames), graphs, cost.memory_gb(tokens))


def other_training(config: Any) -> list[str]:
    """Return what of a language model's training was not measured, each as it is written."""
    return [*unlike(config, _LANGUAGE_MODEL), *_other_adapter(config), *other_precision(config)]


def differences(
    config: Any,
    options: VisionGraphOptions,
    kernels: tuple[str, ...],
    attention: tuple[str, ...] = BY_CUDNN,
) -> list[str]:
    """Return what of an encoder's training was not measured, each as it is written.

    Args:
        config: A Bridge `ConfigContainer`.
        options: Of vision graphs.
        kernels: The measured values of `vision_cuda_graph_tuning.kernels`.
        attention: Those of `vision_cuda_graph_tuning.attention`.
    """
    found = [*unlike(config, _MODEL), *_other_adapter(config), *other_precision(config)]
    return [*found, *other_vision_options(options, kernels, attention)]


def unlike(config: Any, measured: Mapping[str, Any]) -> list[str]:
    """Return the fields of the model whose values are not those that were measured, each as it is written."""
    held = {name: getattr(config.model, name, None) for name in measured}
    return [f"model.{name}={value}" for name, value in held.items() if value not in (None, measured[name])]


def adapter_of(config: Any) -> str | None:
    """Return the kind of a configuration's adapters; None without."""
    adapters = getattr(config, "peft", None)
    return None if adapters is None else type(adapters).__name__


def _other_adapter(config: Any) -> list[str]:
    adapter = adapter_of(config)
    return [] if adapter is None else [f"peft={adapter}"]


def other_precision(config: Any) -> list[str]:
    """Return a precision that is not bf16, in a list."""
    precision = getattr(config, "mixed_precision", None)
    if isinstance(precision, str):
        return [] if precision == _PRECISION else [f"mixed_precision={precision}"]
    held = {name: getattr(precision, name, None) for name in ("fp32", "fp16", "fp8", "fp4")}
    return [f"mixed_precision.{name}={value}" for name, value in held.items() if value]


def other_vision_options(
    options: VisionGraphOptions, kernels: tuple[str, ...], attention: tuple[str, ...] = BY_CUDNN
) -> list[str]:
    """Return the options that were not measured, each as it is written; arguments as of `differences`."""
    wanted = {**_OPTIONS, "kernels": kernels, "attention": attention}
    held = {name: getattr(options, name) for name in wanted}
    found = [f"{PROVIDER_FIELDS[name]}={value}" for name, value in held.items() if value not in wanted[name]]
    parts = [] if options.whole_encoder else [f"{PROVIDER_FIELDS['modules']}={list(options.modules)}"]
    return [*parts, *found, *(["deterministic algorithms"] if deterministic() else [])]


def as_json(found: Forecast) -> dict[str, Any]:
    """Return a forecast as plain values: ms, GiB, and relative errors."""
    measured = found.measured
    fit = None if measured is None else measured.fit
    return {
        "encoder": str(found.encoder),
        "source": None if measured is None else {"file": measured.file, "date": measured.date, "gpu": measured.gpu},
        "errors": None
        if fit is None
        else {"eager_ms": fit.eager, "graphs_ms": fit.graphs, "ratio": fit.ratio, "memory_gb": fit.memory},
        "remark": "" if measured is None else measured.remark,
        "not_measured": list(found.differs),
        "microbatches": [_row_as_json(row) for row in found.rows],
        "largest_bucket": found.largest,
        "memory_gb": found.memory_gb,
        "ratios": None if found.ratios is None else list(found.ratios),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    figures = {"eager_ms": row.eager_ms, "graphs_ms": row.graphs_ms, "ratio": row.ratio, "memory_gb": row.memory_gb}
    return {"tokens": row.tokens, "images": row.images, **figures, "note": row.note}
