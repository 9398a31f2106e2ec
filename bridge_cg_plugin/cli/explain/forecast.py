"""What the project measured of a model's graphs, and where a configuration differs from that."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.cli.planner.records import (
    Measured,
    NotMeasured,
    Row,
    language_model_of,
    least_and_greatest,
    of_encoder,
    of_language_model,
    ranks_of,
)
from bridge_cg_plugin.options import GraphOptions, VisionGraphOptions
from bridge_cg_plugin.options.language_model import MODULES, CudaGraphModule
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from ..gpus import other_gpu
from .models import encoder_of

# Fields of the model and options of vision graphs that figures depend on, by the values that were measured.
_MODEL = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "freeze_vision_model": False}
_LANGUAGE_MODEL = {"freeze_language_model": False, "recompute_granularity": None}
_PRECISION = "bf16_mixed"
_OPTIONS = {
    "offload": (None, ()),
    "recompute": (None, ()),
    "offload_above_gb": (None,),
    "gradient_accumulation_fusion": (True,),
}
_PACKED_OPTIONS = ("offload", "recompute", "offload_above_gb")
_PARTIAL = (CudaGraphModule.attn, CudaGraphModule.moe_router)
# Values of `vision_cuda_graph_tuning.attention` by which encoders of Transformer Engine attend as they do by default.
BY_CUDNN = ("auto", "cudnn")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was measured of a part of a model, or of what is nearest to it.

    Attributes:
        of: The part in words.
        measured: The records; none where there is none like it.
        differs: What of this configuration was not measured, each as it is written.
        largest: Tokens of the largest bucket that can be captured; None without graphs or a limit.
    """

    of: str
    measured: tuple[Measured, ...] = ()
    differs: tuple[str, ...] = ()
    largest: int | None = None

    @property
    def same(self) -> Measured | None:
        """The records of this very model; None where they are of others of its kind."""
        return next((each for each in self.measured if each.of == self.of), None)

    @property
    def holds(self) -> bool:
        """Whether the figures are of this very configuration."""
        return self.same is not None and not self.differs

    @property
    def rows(self) -> tuple[Row, ...]:
        """The measured microbatches that the largest bucket takes; all where it takes none."""
        rows = tuple(row for each in self.measured for row in each.rows)
        return tuple(row for row in rows if self.largest is None or row.tokens <= self.largest) or rows

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The least and the greatest time on graphs over time eager."""
        return least_and_greatest(self.rows)

    @property
    def memory_gb(self) -> float | None:
        """GiB of a slot with the largest bucket; None where there is none or it was not measured."""
        if self.same is None or self.largest is None or self.largest > self.same.rows[-1].tokens:
            return None
        return self.same.memory_gb(self.largest)


def vision_forecast(config: Any, options: VisionGraphOptions, gpu: str | None) -> Forecast | None:
    """Return what was measured of a configuration's vision graphs; None for a model that has no encoder for them.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its vision graphs.
        gpu: A key of `recipes.GPUS`; None takes the GPU that there are records of.
    """
    encoder = encoder_of(getattr(config, "model", None))
    if encoder is None:
        return None
    found = of_encoder(str(encoder), options.kernels)
    differs = [
        text
        for each in found
        for text in (*other_gpu(each.gpu, gpu), *differences(config, options, each.kernels, each.attention))
    ]
    return Forecast(str(encoder), found, tuple(differs), largest_bucket(options))


def largest_bucket(options: VisionGraphOptions) -> int | None:
    """Return the tokens of the largest bucket that options allow; None without graphs or a limit of tokens."""
    if not options.enabled:
        return None
    if options.buckets != "auto":
        return max(*options.buckets, options.max_seq_length or 0, 1)
    return options.max_seq_length


def language_forecast(config: Any, options: GraphOptions, gpu: str | None) -> Forecast | None:
    """Return what was measured of graphs of packed documents like a configuration's; None without such graphs.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpu: A key of `recipes.GPUS`; None takes the GPU that there are records of.
    """
    if not options.packed.enabled or options.language_model.impl == "none":
        return None
    try:
        model = language_model_of(config.model)
    except NotMeasured as why:
        return Forecast("language model", differs=(str(why),))
    modules = [module.name for module in options.language_model.modules]
    found, ranks = of_language_model(model, ranks_of(config.model), modules)
    others = other_options(options, _PARTIAL if model.kind == "experts" else ())
    differs = (*other_gpu(found[0].gpu, gpu), *ranks, *_other_training(config), *others)
    return Forecast(str(model), found, differs, _largest_pack(config, options))


def _largest_pack(config: Any, options: GraphOptions) -> int | None:
    """Return the tokens of the largest bucket, as far as options and data say."""
    if options.packed.buckets != "auto":
        return max(options.packed.buckets)
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    size = getattr(specs, "packed_sequence_size", None)
    return size if isinstance(size, int) and size > 0 else None


def other_options(options: GraphOptions, measured_modules: Collection[CudaGraphModule]) -> list[str]:
    """Return the options of packed graphs that were not measured, each as it is written.

    Args:
        options: All graph options.
        measured_modules: Values of `cuda_graph_modules` that were, besides none.
    """
    packed, modules = options.packed, options.language_model.modules
    held = {name: getattr(packed, name) for name in _PACKED_OPTIONS}
    found = [f"{PACKED_FIELDS[name]}={value}" for name, value in held.items() if value not in (None, ())]
    if modules and set(modules) != set(measured_modules):
        found.append(f"{MODULES}={sorted(module.name for module in modules)}")
    return [*found, *(["deterministic algorithms"] if deterministic() else [])]


def _other_training(config: Any) -> list[str]:
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
    """Return a forecast as plain values: ms and GiB."""
    return {
        "of": found.of,
        "measured": [
            {"of": each.of, "file": each.file, "date": each.date, "gpu": each.gpu, "remark": each.remark}
            for each in found.measured
        ],
        "not_measured": list(found.differs),
        "microbatches": [{**asdict(row), "ratio": row.ratio} for row in found.rows],
        "largest_bucket": found.largest,
        "memory_gb": found.memory_gb,
        "ratios": None if found.ratios is None else list(found.ratios),
    }


def said(found: Forecast) -> Sequence[str]:
    """Return the sentences about what was measured and what was not."""
    if not found.measured:
        why = f": {'; '.join(found.differs)}" if found.differs else ""
        return [f"Nothing was measured of this {found.of}{why}."]
    sources = " and ".join(dict.fromkeys(each.source for each in found.measured))
    remarks = " ".join(dict.fromkeys(each.remark for each in found.measured if each.remark))
    texts = [f"Records of {sources}. {remarks}".rstrip()]
    if found.differs:
        texts.append(f"Not measured here: {', '.join(found.differs)}. {_held(found.measured[0])}")
    return texts


def _held(measured: Measured) -> str:
    """Return what the figures are of instead."""
    if measured.kind != "vision":
        return f"The figures are of {measured.gpu}, a language model trained whole, and default options."
    kernels, attention = PROVIDER_FIELDS["kernels"], PROVIDER_FIELDS["attention"]
    options = "default options" if "auto" in measured.kernels else f"{kernels}={measured.kernels[0]}"
    options += "" if "auto" in measured.attention else f", {attention}={measured.attention[0]}"
    return f"The figures are of one {measured.gpu}, an encoder trained whole, and {options}."
