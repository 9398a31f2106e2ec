"""Microbatches that the project measured, on graphs and eager: what plans and `bridge-cg explain` go by.

`measured.json` has them. A test holds every figure to docs/benchmarks.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


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
        expert, shared: Width of an expert and of the shared one.
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

    @property
    def kind(self) -> str:
        """Which of the measured kinds it is: "dense", "experts" or "hybrid"."""
        if self.mamba:
            return "hybrid"
        return "experts" if self.expert_layers else "dense"

    def __str__(self) -> str:
        kinds = ("attention", "MLP", f"{self.experts}-expert", "Mamba")
        counts = zip((self.attention, self.mlps, self.expert_layers, self.mamba), kinds, strict=True)
        return f"{', '.join(f'{count} {what}' for count, what in counts if count)} layers of {self.hidden}"


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


_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
}
_RANKS = {**_SIZES, "sequence": "sequence_parallel", "exchange": "cp_comm_type"}


def other_ranks(measured: Ranks, ranks: Ranks) -> list[str]:
    """Return what of a layout was not measured, each as it is written."""
    wanted = asdict(measured)
    return [f"model.{_RANKS[name]}={value}" for name, value in asdict(ranks).items() if value != wanted[name]]


def ranks_of(model: Any) -> Ranks:
    """Return how ranks share the model of a Bridge provider, or of one of Megatron's configurations."""
    exchange = getattr(model, "cp_comm_type", None) or "p2p"
    return Ranks(
        **{name: _size(model, field, 1) for name, field in _SIZES.items()},
        sequence=getattr(model, "sequence_parallel", False) is True,
        exchange=exchange if isinstance(exchange, str) else "+".join(dict.fromkeys(exchange)),
    )


# Letters of layers in a hybrid's pattern.
MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
# What no record has, by the fields that ask for it.
_OTHERS = {
    "multi-latent attention": ("multi_latent_attention",),
    "linear attention": ("experimental_attention_variant", "linear_attention_freq"),
    "multi-token prediction": ("mtp_num_layers",),
}


def language_model_of(model: Any) -> LanguageModel:
    """Return the sizes of a Bridge provider's language model, or of one of Megatron's configurations.

    Raises:
        NotMeasured: A size is not known, or layers are of a kind that no record is of.
    """
    for what, fields in _OTHERS.items():
        values = (getattr(model, name, None) for name in fields)
        if any(isinstance(value, (bool, int, str, list)) and value for value in values):
            raise NotMeasured(f"{what} was not measured")
    hidden, heads = _known(model, "hidden_size"), _known(model, "num_attention_heads")
    channels = _size(model, "kv_channels", hidden // heads)
    counts = _layers(model)
    experts = {}
    if counts[EXPERTS]:
        experts = {
            "experts": _known(model, "num_moe_experts"),
            "top": _known(model, "moe_router_topk"),
            "expert": _size(model, "moe_ffn_hidden_size", 0) or _known(model, "ffn_hidden_size"),
            "shared": _size(model, "moe_shared_expert_intermediate_size", 0),
        }
    return LanguageModel(
        attention=counts[ATTENTION],
        mlps=counts[MLP],
        expert_layers=counts[EXPERTS],
        mamba=counts[MAMBA],
        hidden=hidden,
        queries=heads * channels,
        keys=_size(model, "num_query_groups", heads) * channels,
        mlp=_known(model, "ffn_hidden_size") if counts[MLP] else 0,
        **experts,
    )


def _layers(model: Any) -> dict[str, int]:
    """Return how many layers, or halves of them, there are of each kind."""
    patterns = (getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    pattern = next((text for text in patterns if isinstance(text, str) and text), "").partition("/")[0]
    if unknown := set(pattern) - set("M*-E|"):
        raise NotMeasured(f"layers {', '.join(sorted(unknown))} of hybrid_layer_pattern were not measured")
    if pattern:
        return {letter: pattern.count(letter) for letter in (MAMBA, ATTENTION, MLP, EXPERTS)}
    layers, frequency, experts = _known(model, "num_layers"), getattr(model, "moe_layer_freq", 1), 0
    if _size(model, "num_moe_experts", 0) > 1:  # every Nth layer has experts, or those with a 1 in a list
        if isinstance(frequency, int):
            experts = len(range(0, layers, max(frequency, 1)))
        elif isinstance(frequency, Sequence) and all(one in (0, 1) for one in frequency):
            experts = sum(frequency)
        else:
            raise NotMeasured("which layers have experts is not known")
    return {MAMBA: 0, ATTENTION: layers, MLP: layers - experts, EXPERTS: experts}


def _size(model: Any, name: str, default: int) -> int:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _known(model: Any, name: str) -> int:
    if not (value := _size(model, name, 0)):
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
    found = []
    for one in measured()["records"]:
        lists = {name: tuple(one.get(name, ())) for name in ("kernels", "attention", "modules")}
        rows = tuple(Row(**row) for row in one["rows"])
        found.append(Measured(**{**one, **lists, "rows": rows, "ranks": Ranks(**one.get("ranks", {}))}))
    return tuple(found)


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
        models = " and ".join(dict.fromkeys(each.of for each in found))
        sources = " and ".join(dict.fromkeys(each.source for each in found))
        origin = f"{models}, {self._sizes[0]} to {self._sizes[-1]} tokens: {sources} only"
        other = [] if any(each.of == of for each in found) else [f"no record is of {of}"]
        self.origin = "; ".join([origin, *other, *notes])

    def eager(self, tokens: int) -> tuple[float, float]:
        """Return the least and the greatest cost of a microbatch run eager, by the records around its size."""
        first = max(bisect_right(self._sizes, tokens) - 1, 0)
        last = min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)
        near = (*self._ratios[first], *self._ratios[last])
        return tokens / max(near), tokens / min(near)

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens; None where no record is of such a model."""
        return None if self._same is None else self._same.memory_gb(tokens)
