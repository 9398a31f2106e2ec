"""Microbatches that the project measured, on graphs and eager: what plans and `bridge-cg explain` go by.

`measured.json` has them. A test holds every figure to docs/benchmarks.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal["dense", "experts", "hybrid"]
MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"


# What no record has, by the fields that ask for it.
_OTHERS = {
    "multi-latent attention": ("multi_latent_attention",),
    "linear attention": ("experimental_attention_variant", "linear_attention_freq"),
    "multi-token prediction": ("mtp_num_layers",),
}


class NotMeasured(ValueError):
    """No record supports a figure; says why in a sentence's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A language model.

    Attributes:
        attention, mlps, expert_layers, mamba: Layers, or halves of them, of each kind.
        hidden: Width.
        queries, keys: Width of all queries; of all keys, which is that of the values.
        mlp: Width of a dense MLP.
        experts, top: Experts of a layer; how many a token goes through.
        expert: Width of an expert.
        shared: Width of the shared expert.
        fused_activation, fused_loss: Whether each is one kernel.
        rotary_by_document: Whether eager rotates each document in launches of its own.
    """

    attention: int
    mlps: int
    hidden: int
    queries: int
    keys: int
    mlp: int = 0
    expert_layers: int = 0
    experts: int = 0
    top: int = 0
    expert: int = 0
    shared: int = 0
    mamba: int = 0
    fused_activation: bool = False
    fused_loss: bool = False
    rotary_by_document: bool = True

    @property
    def kind(self) -> Kind:
        """Which of the measured kinds it is."""
        if self.mamba:
            return "hybrid"
        return "experts" if self.expert_layers else "dense"

    @property
    def pieces(self) -> int:
        """Layers, or halves of them, in all."""
        return self.attention + self.mlps + self.expert_layers + self.mamba

    def __str__(self) -> str:
        counts = {
            "attention": self.attention,
            "MLP": self.mlps,
            f"{self.experts}-expert": self.expert_layers,
            "Mamba": self.mamba,
        }
        return f"{', '.join(f'{count} {what}' for what, count in counts.items() if count)} layers of {self.hidden}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How ranks share a language model.

    Attributes:
        tensor, context, expert, pipeline: Ranks of each parallelism.
        sequence: Whether tensor-parallel ranks hold a part of the tokens each.
        exchange: How context-parallel ranks exchange keys and values.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    sequence: bool = False
    exchange: str = "p2p"


_RANKS = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "sequence": "sequence_parallel",
    "exchange": "cp_comm_type",
}


def other_ranks(measured: Ranks, ranks: Ranks) -> Iterator[str]:
    """Yield what of a layout was not measured, each as it is written."""
    wanted = asdict(measured)
    yield from (f"model.{_RANKS[name]}={value}" for name, value in asdict(ranks).items() if value != wanted[name])


def ranks_of(model: Any) -> Ranks:
    """Return how ranks share the model of a Bridge provider, or of one of Megatron's configurations."""
    exchange = getattr(model, "cp_comm_type", None) or "p2p"
    several = not isinstance(exchange, str)
    return Ranks(
        tensor=_size(model, "tensor_model_parallel_size", 1),
        context=_size(model, "context_parallel_size", 1),
        expert=_size(model, "expert_model_parallel_size", 1),
        pipeline=_size(model, "pipeline_model_parallel_size", 1),
        sequence=getattr(model, "sequence_parallel", False) is True,
        exchange="+".join(dict.fromkeys(exchange)) if several else exchange,
    )


def language_model_of(model: Any) -> LanguageModel:
    """Return the sizes of a Bridge provider's language model, or of one of Megatron's configurations.

    Raises:
        NotMeasured: A size is not known, or layers are of a kind that no record is of.
    """
    for what, fields in _OTHERS.items():
        if any(_is_set(getattr(model, name, None)) for name in fields):
            raise NotMeasured(f"{what} was not measured")
    hidden, heads = _known(model, "hidden_size"), _known(model, "num_attention_heads")
    channels = _size(model, "kv_channels", hidden // heads)
    counts = _layers(model)
    experts = _experts(model) if counts[EXPERTS] else {}
    return LanguageModel(
        attention=counts[ATTENTION],
        mlps=counts[MLP],
        expert_layers=counts[EXPERTS],
        mamba=counts[MAMBA],
        hidden=hidden,
        queries=heads * channels,
        keys=_size(model, "num_query_groups", heads) * channels,
        mlp=_known(model, "ffn_hidden_size") if counts[MLP] else 0,
        fused_activation=getattr(model, "bias_activation_fusion", False) is True,
        fused_loss=getattr(model, "cross_entropy_loss_fusion", False) is True,
        rotary_by_document=not counts[MAMBA] and getattr(model, "apply_rope_fusion", False) is not True,
        **experts,
    )


def _layers(model: Any) -> dict[str, int]:
    """Return how many layers, or halves of them, there are of each kind."""
    patterns = (getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    pattern = next((text for text in patterns if isinstance(text, str) and text), "")
    if pattern:
        main = pattern.partition("/")[0]
        unknown = set(main) - set("M*-E|")
        if unknown:
            raise NotMeasured(f"layers {', '.join(sorted(unknown))} of hybrid_layer_pattern were not measured")
        return {letter: main.count(letter) for letter in (MAMBA, ATTENTION, MLP, EXPERTS)}
    layers = _known(model, "num_layers")
    with_experts = _with_experts(model, layers) if _size(model, "num_moe_experts", 0) > 1 else 0
    return {MAMBA: 0, ATTENTION: layers, MLP: layers - with_experts, EXPERTS: with_experts}


def _with_experts(model: Any, layers: int) -> int:
    """Return how many layers have experts: every Nth, or those with a 1 in a list."""
    frequency = getattr(model, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return len(range(0, layers, max(frequency, 1)))
    if isinstance(frequency, Sequence) and all(one in (0, 1) for one in frequency):
        return sum(frequency)
    raise NotMeasured("which layers have experts is not known")


def _experts(model: Any) -> dict[str, int]:
    return {
        "experts": _known(model, "num_moe_experts"),
        "top": _known(model, "moe_router_topk"),
        "expert": _size(model, "moe_ffn_hidden_size", 0) or _known(model, "ffn_hidden_size"),
        "shared": _size(model, "moe_shared_expert_intermediate_size", 0),
    }


def _is_set(value: Any) -> bool:
    return isinstance(value, (bool, int, str, list)) and bool(value)


def _size(model: Any, name: str, default: int) -> int:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _known(model: Any, name: str) -> int:
    value = _size(model, name, 0)
    if not value:
        raise NotMeasured(f"model.{name} is not known here")
    return value


FILE = Path(__file__).with_name("measured.json")
# The models that plans go by where no recipe names one.
TOWER = "Qwen3-VL encoder of 27 layers of 1152"
DENSE = LanguageModel(attention=16, mlps=16, hidden=2048, queries=2048, keys=1024, mlp=6144)


@dataclass(frozen=True, slots=True)
class Row:
    """One microbatch, forward and backward.

    Attributes:
        case, mode: Of its record.
        tokens: Its tokens, or patches.
        eager_ms, graphs_ms: Times.
        memory_gb: GiB of a slot whose largest bucket has these tokens; None where no record has it.
    """

    case: str
    mode: str
    tokens: int
    eager_ms: float
    graphs_ms: float
    memory_gb: float | None

    @property
    def ratio(self) -> float:
        """Time on graphs over time eager."""
        return self.graphs_ms / self.eager_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microbatches of one model, trained whole.

    Attributes:
        of: The model in words.
        kind: "vision", or the kind of a language model.
        file, date, gpu: Of the records.
        rows: The microbatches, ascending.
        kernels, attention: Values of these keys of `vision_cuda_graph_tuning` that they hold for.
        modules: Value of `cuda_graph_modules` that they hold for.
        ranks: How GPUs share the model.
        remark: What else to know of them.
    """

    of: str
    kind: str
    file: str
    date: str
    gpu: str
    rows: tuple[Row, ...]
    kernels: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ranks: Ranks = field(default_factory=Ranks)
    remark: str = ""

    @property
    def source(self) -> str:
        """Where they come from."""
        return f"{self.file}, {self.date}, {self.gpu}"

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens: those of the nearest record, by tokens."""
        known = [(row.tokens, row.memory_gb) for row in self.rows if row.memory_gb is not None]
        if not known:
            return None
        size, memory = min(known, key=lambda one: abs(one[0] - tokens))
        return memory * tokens / size


@cache
def measured() -> dict[str, Any]:
    """Return what the package has of the records."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@cache
def records() -> tuple[Measured, ...]:
    """Return all measured microbatches."""
    return tuple(_measured_of(found) for found in measured()["records"])


def _measured_of(found: Mapping[str, Any]) -> Measured:
    lists = {name: tuple(found.get(name, ())) for name in ("kernels", "attention", "modules")}
    rows = tuple(Row(**row) for row in found["rows"])
    return Measured(**{**found, **lists, "rows": rows, "ranks": Ranks(**found.get("ranks", {}))})


def of_encoder(name: str, kernels: str) -> tuple[Measured, ...]:
    """Return the records of a vision encoder, with these kernels if possible; none where there are none."""
    found = [each for each in records() if each.of == name]
    return tuple([each for each in found if kernels in each.kernels] or found)[:1]


def of_language_model(
    model: LanguageModel, ranks: Ranks, modules: Iterable[str] = ()
) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """Return the records that are nearest to a language model, and how its ranks differ, each as it is written.

    They are of its kind: over the same ranks, else on one GPU; of the same layers and width, else all.
    """
    wanted = tuple(sorted(modules))
    of_kind = [each for each in records() if each.kind == model.kind]
    of_kind = [each for each in of_kind if each.modules == wanted] or [each for each in of_kind if not each.modules]
    alike = [each for each in of_kind if each.ranks == ranks]
    found = alike or [each for each in of_kind if each.ranks == Ranks()]
    same = [each for each in found if each.of == str(model)]
    return tuple(same or found), tuple(other_ranks(found[0].ranks, ranks))


def least_and_greatest(rows: Iterable[Row]) -> tuple[float, float] | None:
    """Return the least and the greatest ratio; None without rows."""
    ratios = [row.ratio for row in rows]
    return (min(ratios), max(ratios)) if ratios else None


class Costs:
    """What microbatches cost, in tokens: a replay its bucket's, an eager one its own over a measured ratio."""

    def __init__(self, found: Sequence[Measured], of: str, notes: Sequence[str] = ()) -> None:
        """Take the records.

        Args:
            found: At least one model's.
            of: The model that is planned for.
            notes: What of it was not measured.
        """
        rows = [row for each in found for row in each.rows]
        self._sizes = sorted({row.tokens for row in rows})
        self._ratios = [[row.ratio for row in rows if row.tokens == size] for size in self._sizes]
        self._same = next((each for each in found if each.of == of and not notes), None)
        self.origin = "; ".join([_origin(found, self._sizes), *_other_model(found, of), *notes])

    def eager(self, tokens: int) -> tuple[float, float]:
        """Return the least and the greatest cost of a microbatch run eager, by the records around its size."""
        first = max(bisect_right(self._sizes, tokens) - 1, 0)
        last = min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)
        near = (*self._ratios[first], *self._ratios[last])
        return tokens / max(near), tokens / min(near)

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens; None where no record is of such a model."""
        return None if self._same is None else self._same.memory_gb(tokens)


def _origin(found: Sequence[Measured], sizes: Sequence[int]) -> str:
    models = " and ".join(dict.fromkeys(each.of for each in found))
    sources = " and ".join(dict.fromkeys(each.source for each in found))
    return f"{models}, {sizes[0]} to {sizes[-1]} tokens: {sources} only"


def _other_model(found: Sequence[Measured], of: str) -> list[str]:
    return [] if any(each.of == of for each in found) else [f"no record is of {of}"]
