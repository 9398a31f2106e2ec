"""Sizes of a language model, and how ranks share it, by which records are told apart."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
