"""What the project measured of a model's graphs and of whole steps, and where a configuration differs from that."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.cli.planner.records import (
    TOWER,
    Measured,
    NotMeasured,
    Ranks,
    Row,
    language_model_of,
    least_and_greatest,
    measured,
    of_encoder,
    of_language_model,
    other_ranks,
    ranks_of,
)
from bridge_cg_plugin.options import GraphOptions, VisionGraphOptions
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL, MODULES, CudaGraphModule
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from ..checks import other_gpu
from .models import encoder_of

# Fields of the model, of parts and of whole steps, by the values that were measured.
_ENCODER = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "freeze_vision_model": False}
_LANGUAGE_MODEL = {"freeze_language_model": False, "recompute_granularity": None}
_FUSED = {"bias_activation_fusion": True, "cross_entropy_loss_fusion": True, "apply_rope_fusion": False}
_STEP = {"freeze_vision_model": False, **_LANGUAGE_MODEL, **_FUSED}
_PRECISION = "bf16_mixed"
_OPTIONS = {
    "offload": (None, ()),
    "recompute": (None, ()),
    "offload_above_gb": (None,),
}
_PACKED_OPTIONS = ("offload", "recompute", "offload_above_gb")
_PARTIAL = (CudaGraphModule.attn, CudaGraphModule.moe_router)
# Values of `vision_cuda_graph_tuning.attention` by which encoders of Transformer Engine attend as they do by default.
_BY_CUDNN = ("auto", "cudnn")
# Values of `vision_cuda_graph_tuning.kernels`, by whether graphs round as eager does.
_KERNELS = {True: ("exact",), False: ("auto", "fast")}


def _unlike(config: Any, fields: Mapping[str, Any], adapter: str | None = None) -> list[str]:
    """Return the training that was not measured, each as it is written: fields of the model, adapters, precision."""
    held = {name: getattr(config.model, name, None) for name in fields}
    found = [f"model.{name}={value}" for name, value in held.items() if value not in (None, fields[name])]
    if (own := _adapter_of(config)) != adapter:
        found.append(f"peft={own}")
    precision = getattr(config, "mixed_precision", None)
    if isinstance(precision, str):
        return [*found, *([] if precision == _PRECISION else [f"mixed_precision={precision}"])]
    low = {name: getattr(precision, name, None) for name in ("fp32", "fp16", "fp8", "fp4")}
    return [*found, *(f"mixed_precision.{name}={value}" for name, value in low.items() if value)]


def _adapter_of(config: Any) -> str | None:
    adapters = getattr(config, "peft", None)
    return None if adapters is None else type(adapters).__name__


def _other_vision(
    options: VisionGraphOptions, kernels: tuple[str, ...], attention: tuple[str, ...] = _BY_CUDNN
) -> list[str]:
    wanted = {**_OPTIONS, "kernels": kernels, "attention": attention}
    held = {name: getattr(options, name) for name in wanted}
    found = [f"{PROVIDER_FIELDS[name]}={value}" for name, value in held.items() if value not in wanted[name]]
    return [*found, *_determinism()]


def _other_packed(options: GraphOptions, measured_modules: Collection[CudaGraphModule] = ()) -> list[str]:
    packed, modules = options.packed, options.language_model.modules
    held = {name: getattr(packed, name) for name in _PACKED_OPTIONS}
    found = [f"{PACKED_FIELDS[name]}={value}" for name, value in held.items() if value not in (None, ())]
    if modules and set(modules) != set(measured_modules):
        found.append(f"{MODULES}={sorted(module.name for module in modules)}")
    return [*found, *_determinism()]


def _determinism() -> list[str]:
    return ["deterministic algorithms"] if deterministic() else []


def differences(config: Any, options: VisionGraphOptions, found: Measured) -> list[str]:
    """Return what of an encoder's training was not measured, each as it is written.

    Args:
        config: A Bridge `ConfigContainer`.
        options: Of vision graphs.
        found: The records.
    """
    return [*_unlike(config, _ENCODER), *_other_vision(options, found.kernels, found.attention)]


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

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: ms and GiB."""
        source = ("of", "file", "date", "gpu", "remark")
        return {
            "of": self.of,
            "measured": [{name: getattr(each, name) for name in source} for each in self.measured],
            "not_measured": list(self.differs),
            "microbatches": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
            "largest_bucket": self.largest,
            "memory_gb": self.memory_gb,
            "ratios": None if self.ratios is None else list(self.ratios),
        }

    def said(self) -> list[str]:
        """Return the sentences about what was measured and what was not."""
        if not self.measured:
            why = f": {'; '.join(self.differs)}" if self.differs else ""
            return [f"Nothing was measured of this {self.of}{why}."]
        sources = " and ".join(dict.fromkeys(each.source for each in self.measured))
        remarks = " ".join(dict.fromkeys(each.remark for each in self.measured if each.remark))
        texts = [f"Records of {sources}. {remarks}".rstrip()]
        if self.differs:
            texts.append(f"Not measured here: {', '.join(self.differs)}. {_held(self.measured[0])}")
        return texts


def _held(found: Measured) -> str:
    """Return what the figures are of instead."""
    if found.kind != "vision":
        return f"The figures are of {found.gpu}, a language model trained whole, and default options."
    kernels, attention = PROVIDER_FIELDS["kernels"], PROVIDER_FIELDS["attention"]
    options = "default options" if "auto" in found.kernels else f"{kernels}={found.kernels[0]}"
    options += "" if "auto" in found.attention else f", {attention}={found.attention[0]}"
    return f"The figures are of one {found.gpu}, an encoder trained whole, and {options}."


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
    differs = [text for one in found for text in (*other_gpu(one.gpu, gpu), *differences(config, options, one))]
    return Forecast(str(encoder), found, tuple(differs), largest_bucket(options))


def largest_bucket(options: VisionGraphOptions) -> int | None:
    """Return the tokens of the largest bucket that options allow; None without graphs or a limit of tokens."""
    if not options.enabled or options.buckets == "auto":
        return options.max_seq_length if options.enabled else None
    return max(*options.buckets, options.max_seq_length or 0, 1)


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
    others = _other_packed(options, _PARTIAL if model.kind == "experts" else ())
    differs = (*other_gpu(found[0].gpu, gpu), *ranks, *_unlike(config, _LANGUAGE_MODEL), *others)
    return Forecast(str(model), found, differs, _largest_pack(config, options))


def _largest_pack(config: Any, options: GraphOptions) -> int | None:
    """Return the tokens of the largest bucket, as far as options and data say."""
    if options.packed.buckets != "auto":
        return max(options.packed.buckets)
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    size = getattr(specs, "packed_sequence_size", None)
    return size if isinstance(size, int) and size > 0 else None


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

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: ms, GiB."""
        return {**self.found, "ratio": self.ratio, "ratios": list(self.ratios), "not_measured": list(self.differs)}

    def said(self) -> str:
        """Return the sentences about it."""
        found, runs = self.found, self.found["eager_runs_ms"]
        head = "Whole step, measured for this model and layout"
        if self.differs:
            head = f"Whole step: not measured with {', '.join(self.differs)}. The nearest"
        samples = f" of {found['samples']} samples" if found["samples"] else ""
        how = f"{SETTING}={found['setting']}" if found["setting"] else f"{IMPL}={found['impl']}"
        several = found["gpus"] > 1
        host = "Eager's time depends on the host, and it was timed once."
        if len(runs) > 1:
            least, greatest = (f"{ratio:.2f}" for ratio in self.ratios)
            spread = f"its {len(runs)} runs took {_range(runs)} ms ({least} to {greatest})"
            host = f"Eager's time depends on the host: {spread}."
        times = ", ".join(
            f"{part} {_range(ms['eager_runs'])} ms eager and {ms['graphs']:.0f} ms on graphs"
            for part, ms in found["parts_ms"].items()
        )
        memory = " and ".join(f"{gb:.1f} GiB ({part})" for part, gb in found["memory_gb"].items())
        texts = [
            f"{head}: {found['of']}, on {found['gpus']} {found['gpu']}{'s' if several else ''}.",
            f"A step{samples} takes {runs[0]:.0f} ms eager and {found['graphs_ms']:.0f} ms with {how} "
            f"({self.ratio:.2f}).",
            host,
            f"GPU time of a rank{', waits for other ranks included' if several else ''}: {times}." if times else "",
            f"Graphs take {memory}. {found['file']}, {found['date']}.",
        ]
        return " ".join(filter(None, texts))


def _range(values: Sequence[float]) -> str:
    least, greatest = (f"{value:.0f}" for value in (min(values), max(values)))
    return least if least == greatest else f"{least} to {greatest}"


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
    steps = []
    for step in measured()["steps"]:
        if not _is_near(step, config, options, asdict(model)):
            continue
        differs = [f"a language model of {model}"] if step["model"] is None else []
        if step["model"] not in (None, asdict(model)):
            differs.append(f"model.num_layers={config.model.num_layers}")
        differs += other_ranks(Ranks(**(step["ranks"] or {})), ranks_of(config.model))
        differs += other_gpu(step["gpu"], gpu)
        differs += [] if gpus in (None, step["gpus"]) else [f"{gpus} GPUs"]
        differs += _unlike(config, _STEP, step["adapter"])
        if step["setting"] not in (None, options.choice.setting):
            differs.append(f"{SETTING}={options.choice.setting}")
        differs += _other_vision(options.vision, _KERNELS[step["setting"] == "exact"])
        differs += _other_packed(options)
        steps.append(WholeStep(step, tuple(dict.fromkeys(differs))))
    return min(steps, key=lambda step: len(step.differs), default=None)


def _is_near(step: Mapping[str, Any], config: Any, options: GraphOptions, model: Mapping[str, Any]) -> bool:
    """Whether a step has the same kind of graphs, adapters and layers: their widths, not how many there are."""
    if step["impl"] != options.language_model.impl or step["adapter"] != _adapter_of(config):
        return False
    counts = ("attention", "mlps", "expert_layers")
    alike = all(size == model[name] for name, size in (step["model"] or {}).items() if name not in counts)
    return step["model"] is None or (alike and options.packed.enabled and options.choice.setting is not None)
