"""What the project measured: ratios of graphs over eager, and where a configuration differs from what they are of.

`measured.json` has them, by microbatch and by whole step. A test holds every figure to docs/benchmarks.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.options import GraphOptions, VisionGraphOptions
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL, MODULES
from bridge_cg_plugin.options.packed import PACKED_FIELDS, PackedOptions
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from .explain.models import encoder_of

FILE = Path(__file__).with_name("measured.json")
# The encoder of all measured steps, and the language model that plans go by where no recipe names one.
TOWER, DENSE = "Qwen3-VL encoder of 27 layers of 1152", "16 attention, 16 MLP layers of 2048"
# Fields of the layout -> their values on one GPU.
ALONE = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
    "cp_comm_type": "p2p",
}
_TRAINED = {"freeze_vision_model": False, "freeze_language_model": False, "recompute_granularity": None}
# Fields of layers that no record is of.
_OTHERS = {
    "multi-latent attention": ("multi_latent_attention",),
    "linear attention": ("experimental_attention_variant", "linear_attention_freq"),
    "multi-token prediction": ("mtp_num_layers",),
}


class NotMeasured(ValueError):
    """No record supports a figure; says why in a sentence's part."""


class Row(NamedTuple):
    """One microbatch, forward and backward.

    Attributes:
        case, mode: Of its record.
        tokens: Its tokens, or patches.
        ratio: Time on graphs over time eager.
        memory_gb: GiB of a slot whose largest bucket has these tokens; None where no record has it.
    """

    case: str
    mode: str
    tokens: int
    ratio: float
    memory_gb: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microbatches of one model, trained whole.

    Attributes:
        of: The model in words.
        kind: "vision", or the kind of a language model: "dense", "experts" or "hybrid".
        file, date, gpu: Of the records.
        rows: The microbatches, ascending.
        kernels: Values of `vision_cuda_graph_tuning.kernels` that they hold for.
        modules: Value of `cuda_graph_modules` that they hold for.
        ranks: Fields of the layout that are not as on one GPU.
        remark: What else to know of them.
    """

    of: str
    kind: str
    file: str
    date: str
    gpu: str
    rows: tuple[Row, ...]
    kernels: Sequence[str] = ()
    modules: Sequence[str] = ()
    ranks: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    @property
    def source(self) -> str:
        """Where they come from."""
        return f"{self.file}, {self.date}, {self.gpu}"

    def nearest(self, tokens: int) -> Row:
        """Return the microbatch that is nearest in size."""
        return min(self.rows, key=lambda row: abs(row.tokens - tokens))

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens: those of the nearest record, by tokens."""
        row = self.nearest(tokens)
        return None if row.memory_gb is None else row.memory_gb * tokens / row.tokens


@cache
def records() -> tuple[Measured, ...]:
    """Return all measured microbatches."""
    found = json.loads(FILE.read_text())["records"]
    return tuple(Measured(**{**one, "rows": tuple(Row(*row) for row in one["rows"])}) for one in found)


@cache
def steps() -> tuple[Mapping[str, Any], ...]:
    """Return all measured whole steps."""
    return tuple(json.loads(FILE.read_text())["steps"])


def of_encoder(name: str, kernels: str = "auto") -> Measured | None:
    """Return the records of a vision encoder, with these kernels if possible; None where there are none."""
    found = [each for each in records() if each.of == name]
    return max(found, key=lambda each: kernels in each.kernels, default=None)


def of_language_model(model: str, ranks: Mapping[str, Any], modules: Iterable[str] = ()) -> Measured:
    """Return the records that are nearest to a language model: of its kind, its modules, ranks and layers in turn.

    Args:
        model: What `layers_of` returns.
        ranks: Fields of the layout that are not as on one GPU.
        modules: Parts of layers on graphs; none are all.
    """
    wanted = sorted(modules)
    found = [each for each in records() if each.kind == kind_of(model)]
    found = [each for each in found if each.modules == wanted] or [each for each in found if not each.modules]
    return max(found, key=lambda each: (each.ranks == ranks, not each.ranks, each.of == model))


def kind_of(model: str) -> str:
    """Return which of the measured kinds a language model is."""
    return "hybrid" if "Mamba" in model else "experts" if "expert" in model else "dense"


def ranks_of(model: Any) -> dict[str, Any]:
    """Return the fields of a Bridge provider's layout that are not as on one GPU."""
    found = {name: getattr(model, name, None) for name in ALONE}
    exchange = found["cp_comm_type"] or "p2p"
    found["cp_comm_type"] = exchange if isinstance(exchange, str) else "+".join(dict.fromkeys(exchange))
    kept = {name: value for name, value in found.items() if isinstance(value, type(ALONE[name]))}
    return {name: value for name, value in kept.items() if value != ALONE[name]}


def layers_of(model: Any) -> str:
    """Return the layers of a Bridge provider's language model in words.

    Raises:
        NotMeasured: They are not known, or of a kind that no record is of.
    """
    for what, fields in _OTHERS.items():
        values = (getattr(model, name, None) for name in fields)
        if any(isinstance(value, (bool, int, str, list)) and value for value in values):
            raise NotMeasured(f"{what} was not measured")
    patterns = (getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    pattern = next((text for text in patterns if isinstance(text, str) and text), "").partition("/")[0]
    experts, frequency = _size(model, "num_moe_experts") or 0, getattr(model, "moe_layer_freq", 1)
    every = frequency == 1 or (isinstance(frequency, Sequence) and {*frequency} == {1})
    if not pattern and experts > 1 and not every:
        raise NotMeasured("layers with and without experts were not measured")
    if not pattern:
        pattern = ("*E" if experts > 1 else "*-") * _known(model, "num_layers")
    if unknown := set(pattern) - set("M*-E|"):
        raise NotMeasured(f"layers {', '.join(sorted(unknown))} of hybrid_layer_pattern were not measured")
    names = {"*": "attention", "-": "MLP", "E": f"{experts}-expert", "M": "Mamba"}
    counts = ", ".join(f"{pattern.count(letter)} {name}" for letter, name in names.items() if letter in pattern)
    return f"{counts} layers of {_known(model, 'hidden_size')}"


def _size(model: Any, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _known(model: Any, name: str) -> int:
    if not (value := _size(model, name)):
        raise NotMeasured(f"model.{name} is not known here")
    return value


def differences(config: Any, ranks: Mapping[str, Any], adapter: str | None = None) -> list[str]:
    """Return what of a configuration's training was not measured, each as it is written.

    Args:
        config: A Bridge `ConfigContainer`.
        ranks: Fields of the layout that were measured, as far as they matter.
        adapter: The kind of adapters that was measured.
    """
    held = {**{name: ALONE[name] for name in ranks}, **ranks_of(config.model)}
    found = [f"model.{name}={held[name]}" for name in ranks if held[name] != ranks[name]]
    trained = {name: getattr(config.model, name, None) for name in _TRAINED}
    found += [f"model.{name}={value}" for name, value in trained.items() if value not in (None, _TRAINED[name])]
    peft, precision = getattr(config, "peft", None), getattr(config, "mixed_precision", None)
    own = None if peft is None else type(peft).__name__
    found += [] if own == adapter else [f"peft={own}"]
    if isinstance(precision, str):
        found += [] if precision == "bf16_mixed" else [f"mixed_precision={precision}"]
    else:
        low = {name: getattr(precision, name, None) for name in ("fp32", "fp16", "fp8", "fp4")}
        found += [f"mixed_precision.{name}={value}" for name, value in low.items() if value]
    return [*found, *(["deterministic algorithms"] if deterministic() else [])]


def _other_gpu(measured: str, gpu: str | None) -> list[str]:
    return [] if gpu is None or gpu in measured.lower() else [f"--graphs {gpu}"]


def _other_memory(options: VisionGraphOptions | PackedOptions, fields: Mapping[str, str]) -> list[str]:
    held = {name: getattr(options, name) for name in ("offload", "recompute", "offload_above_gb")}
    return [f"{fields[name]}={value}" for name, value in held.items() if value not in (None, ())]


def _other_vision(options: VisionGraphOptions, kernels: Sequence[str]) -> list[str]:
    measured = {"kernels": kernels, "attention": ("auto", "cudnn")}
    held = {name: getattr(options, name) for name in measured}
    others = [f"{PROVIDER_FIELDS[name]}={value}" for name, value in held.items() if value not in measured[name]]
    return [*_other_memory(options, PROVIDER_FIELDS), *others]


def _other_packs(options: GraphOptions, modules: Sequence[str] = ()) -> list[str]:
    named = sorted(module.name for module in options.language_model.modules)
    others = [f"{MODULES}={named}"] if named and named != list(modules) else []
    return [*_other_memory(options.packed, PACKED_FIELDS), *others]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was measured of a part of a model, or of what is nearest to it.

    Attributes:
        of: The part in words.
        found: The records; None where there are none.
        differs: What of this configuration was not measured, each as it is written.
        largest: Tokens of the largest bucket that can be captured; None without graphs or a limit.
    """

    of: str
    found: Measured | None = None
    differs: tuple[str, ...] = ()
    largest: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the figures are of this very configuration."""
        return self.found is not None and self.found.of == self.of and not self.differs

    @property
    def rows(self) -> tuple[Row, ...]:
        """The measured microbatches that the largest bucket takes; all where it takes none."""
        rows = self.found.rows if self.found else ()
        return tuple(row for row in rows if self.largest is None or row.tokens <= self.largest) or rows

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The least and the greatest time on graphs over time eager."""
        ratios = [row.ratio for row in self.rows]
        return (min(ratios), max(ratios)) if ratios else None

    @property
    def memory_gb(self) -> float | None:
        """GiB of a slot with the largest bucket; None where there is none or it was not measured."""
        if not self.holds or self.found is None or self.largest is None or self.largest > self.found.rows[-1].tokens:
            return None
        return self.found.memory_gb(self.largest)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: GiB and ratios."""
        source = {name: getattr(self.found, name, None) for name in ("of", "file", "date", "gpu", "remark")}
        return {
            "of": self.of,
            "measured": source if self.found else None,
            "not_measured": list(self.differs),
            "microbatches": [row._asdict() for row in self.rows],
            "largest_bucket": self.largest,
            "memory_gb": self.memory_gb,
            "ratios": None if self.ratios is None else list(self.ratios),
        }

    def said(self) -> list[str]:
        """Return the sentences about what was measured and what was not."""
        if self.found is None:
            return [f"Nothing was measured of this {'; '.join([self.of, *self.differs])}."]
        texts = [f"Records of {self.found.source}. {self.found.remark}".rstrip()]
        if self.differs:
            texts.append(f"Not measured here: {', '.join(self.differs)}.")
        return texts


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
    found = of_encoder(encoder, options.kernels)
    differs: list[str] = []
    if found is not None:
        ranks = {name: ALONE[name] for name in ("tensor_model_parallel_size", "context_parallel_size")}
        differs = [*_other_gpu(found.gpu, gpu), *differences(config, ranks), *_other_vision(options, found.kernels)]
    named = () if options.buckets == "auto" else options.buckets
    largest = max((*named, options.max_seq_length or 0)) or None if options.enabled else None
    return Forecast(encoder, found, tuple(differs), largest)


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
        model = layers_of(config.model)
    except NotMeasured as why:
        return Forecast("language model", differs=(str(why),))
    found = of_language_model(model, ranks_of(config.model), [m.name for m in options.language_model.modules])
    differs = [*_other_gpu(found.gpu, gpu), *differences(config, {**ALONE, **found.ranks})]
    buckets = options.packed.buckets
    largest = pack_size(config) if buckets == "auto" else max(buckets)
    return Forecast(model, found, (*differs, *_other_packs(options, found.modules)), largest)


def pack_size(config: Any) -> int | None:
    """Return the tokens of packs that are made offline; None where there are none."""
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
    def ratios(self) -> tuple[float, float]:
        """Time on graphs over the slowest and over the fastest eager run."""
        graphs, eager = self.found["graphs_ms"], self.found["eager_ms"]
        return graphs / max(eager), graphs / min(eager)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: ms, GiB."""
        return {**self.found, "ratios": list(self.ratios), "not_measured": list(self.differs)}

    def said(self) -> str:
        """Return the sentences about it."""
        found = self.found
        head = "Whole step, measured for this model and layout"
        if self.differs:
            head = f"Whole step: not measured with {', '.join(self.differs)}. The nearest"
        how = f"{SETTING}={found['setting']}" if found["setting"] else f"{IMPL}={found['impl']}"
        eager = " to ".join(dict.fromkeys(f"{ms:.0f}" for ms in (min(found["eager_ms"]), max(found["eager_ms"]))))
        ratios = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in self.ratios))
        return (
            f"{head}: {found['of']}, on {found['gpus']} {found['gpu']}{'s' if found['gpus'] > 1 else ''}. "
            f"A step takes {eager} ms eager and {found['graphs_ms']:.0f} ms with {how} ({ratios}). Eager's time "
            f"depends on the host. Graphs take {found['memory_gb']:.1f} GiB. {found['file']}, {found['date']}."
        )


def whole_step(config: Any, options: GraphOptions, gpu: str | None, gpus: int | None) -> WholeStep | None:
    """Return the measured step that is nearest to a configuration; None where no record is of a model like it.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpu: A key of `recipes.GPUS`; None is not known.
        gpus: How many there are; None is not known.
    """
    if not options.vision.enabled or encoder_of(getattr(config, "model", None)) != TOWER:
        return None
    try:
        model = layers_of(config.model)
    except NotMeasured:
        return None
    peft = getattr(config, "peft", None)
    found = []
    for step in steps():
        alike = step["layers"] is None or (_widths(step["layers"]) == _widths(model) and options.choice.setting)
        adapter = None if peft is None else type(peft).__name__
        if step["impl"] != options.language_model.impl or step["adapter"] != adapter or not alike:
            continue
        differs = [] if step["layers"] == model else [f"{model}"]
        differs += [*_other_gpu(step["gpu"], gpu), *([] if gpus in (None, step["gpus"]) else [f"{gpus} GPUs"])]
        differs += differences(config, {**ALONE, **step["ranks"]}, step["adapter"])
        if step["setting"] not in (None, options.choice.setting):
            differs.append(f"{SETTING}={options.choice.setting}")
        kernels = ("exact",) if step["setting"] == "exact" else ("auto", "fast")
        differs += [*_other_vision(options.vision, kernels), *_other_packs(options)]
        found.append(WholeStep(step, tuple(differs)))
    return min(found, key=lambda step: len(step.differs), default=None)


def _widths(layers: str) -> tuple[str, str]:
    """Return what models of the same layers, more or fewer of them, have in common."""
    return kind_of(layers), layers.rpartition(" of ")[2]


class Costs:
    """What microbatches cost, in tokens: a replay its bucket's, an eager one its own over a measured ratio."""

    def __init__(self, found: Measured, of: str, differs: Sequence[str] = ()) -> None:
        """Take the records.

        Args:
            found: Of the nearest model.
            of: The model that is planned for.
            differs: What of it was not measured.
        """
        self._found = found
        other = [] if found.of == of else [f"no record is of {of}"]
        notes = [f"not measured: {', '.join(differs)}"] if differs else []
        sizes = f"{found.rows[0].tokens} to {found.rows[-1].tokens} tokens"
        self.origin = "; ".join([f"{found.of}, {sizes}: {found.source} only", *other, *notes])

    def eager(self, tokens: int) -> float:
        """Return the cost of a microbatch run eager, by the record that is nearest in size."""
        return tokens / self._found.nearest(tokens).ratio
