"""The cost of a language model's microbatch by its sizes, from rates that were fitted to the project's records.

Time of the GPU is a sum of amounts times rates:

    pieces        layers, or halves of them                                    launches inside a graph, small kernels
    parameters    those on a rank                                              reading weights, adding up gradients
    products      floating-point operations of matrix products                 forward and twice that backward
    attention     the same of causal attention, half of each document's square forward and 2.5 times that backward
    bytes         what norms, activations, rotation and loss read and write
    scan          tokens times widths of Mamba layers
    rows          rows that attention's backward scans, times width            (`attention_bounds.scan_cost`)
    shared        what ranks send: tensor, sequence, ring, all_to_all, expert_ranks

Eager also waits for the host: launches of every layer, and of every document where rotation is not fused. Memory is
tokens times widths that a backward needs. `measured.json` has the rates and their errors as they were
fitted to the records of November 2026.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .cost import MILLION, CostModel
from .shapes import LanguageModel, NotMeasured, Ranks

FILE = Path(__file__).with_name("measured.json")
TERA, GIGA = 1e12, 1e9
# Work of a backward with its forward, for one of a forward.
LINEAR_PASSES, ATTENTION_PASSES = 3.0, 3.5
# Elements that are read and written for a token, forward and backward: of a norm with its residual by width, of norms
# and rotation of queries and keys, of an activation (its gate included) in one kernel and in several, of moving a token
# to an expert and back, of the loss.
NORM, ROTATION = 12, 12
FUSED_GATE, GATE, PLAIN_ACTIVATION = 8, 18, 5
MOVED = 8
FUSED_LOSS, LOSS = 6, 20
# Elements that are kept for the backward: of each piece by width, of queries and keys, of an activation.
KEPT, KEPT_ATTENTION = 4, 3
KEPT_FUSED_GATE, KEPT_GATE, KEPT_PLAIN = 3, 5, 2
# Records of models whose attention and routers are on graphs, and whose experts run eager.
EXPERTS_EAGER = "experts_eager"
# A model whose amounts are this many times outside those of the records has no forecast.
FAR = 4.0


class Amount(NamedTuple):
    """How an amount grows: what there is of it, for a token, a million squares of documents, a million rows."""

    fixed: float = 0.0
    token: float = 0.0
    square: float = 0.0
    row: float = 0.0

    def of(self, tokens: float, squares: float, rows: float) -> float:
        """Return the amount for tokens, squares and rows, the last two in millions."""
        return self.fixed + self.token * tokens + self.square * squares + self.row * rows


def amounts(model: LanguageModel, ranks: Ranks) -> dict[str, Amount]:
    """Return what a rank does in forward and backward of a pack, whose tokens are those of all ranks."""
    part = 1.0 / ranks.context
    wide = model.queries * model.attention / ranks.tensor
    found = {
        "pieces": Amount(model.pieces),
        "parameters": Amount(parameters(model, ranks) / GIGA),
        "products": Amount(token=part * LINEAR_PASSES * products(model, ranks) / TERA),
        "attention": Amount(square=part * ATTENTION_PASSES * 2 * wide * MILLION / TERA),
        "bytes": Amount(token=part * 2 * _touched(model, ranks) / GIGA),
        "scan": Amount(token=part * model.mamba * model.inner / ranks.tensor / GIGA),
        "rows": Amount(row=part * wide * MILLION / GIGA),
    }
    shared = _shared(ranks)
    if shared:
        found[f"{shared}_pieces"] = Amount(model.attention if ranks.context > 1 else model.pieces)
        sent = {
            "ring": 2 * model.keys * model.attention,
            "all_to_all": (model.queries + model.keys) * model.attention,
            "expert_ranks": model.hidden * model.top * model.expert_layers,
        }
        found[f"{shared}_bytes"] = Amount(token=part * 2 * sent.get(shared, model.hidden * model.pieces) / GIGA)
    return found


def _shared(ranks: Ranks) -> str:
    """Return the way in which ranks share a model; empty where no record is of it."""
    try:
        return ranks.shared
    except NotMeasured:
        return ""


def products(model: LanguageModel, ranks: Ranks) -> float:
    """Return the floating-point operations of a forward's matrix products for a token."""
    routed = model.expert_layers * (_matrices(model) * model.top * model.expert + model.experts)
    return 2 * model.hidden * ((_divided(model) + model.vocabulary) / ranks.tensor + routed)


def parameters(model: LanguageModel, ranks: Ranks) -> float:
    """Return the parameters on a rank, embedding and output layer included."""
    routed = model.expert_layers * _matrices(model) * model.experts * model.expert / ranks.expert
    return model.hidden * ((_divided(model) + 2 * model.vocabulary) / ranks.tensor + routed)


def _matrices(model: LanguageModel) -> int:
    return 3 if model.gated else 2


def _divided(model: LanguageModel) -> float:
    """Return the widths of all matrices of layers that tensor-parallel ranks divide; each is by the hidden size."""
    attention = model.attention * (2 * model.queries + 2 * model.keys)
    dense = model.mlps * model.mlp + model.expert_layers * model.shared
    return attention + _matrices(model) * dense + model.mamba * (model.projected + model.inner)


def _touched(model: LanguageModel, ranks: Ranks) -> float:
    """Return the elements that kernels which do no products read and write for a token."""
    h = model.hidden / (ranks.tensor if ranks.sequence else 1)
    gate = (FUSED_GATE if model.fused_activation else GATE) if model.gated else PLAIN_ACTIVATION
    routed = FUSED_GATE if model.gated else PLAIN_ACTIVATION  # the plugin's kernel, or upstream's fused one
    found = NORM * h * model.pieces
    found += model.attention * ROTATION * (model.queries + model.keys) / ranks.tensor
    found += gate * (model.mlps * model.mlp + model.expert_layers * model.shared) / ranks.tensor
    found += model.expert_layers * model.top * (routed * model.expert + MOVED * model.hidden)
    return found + (FUSED_LOSS if model.fused_loss else LOSS) * model.vocabulary / ranks.tensor


def kept(model: LanguageModel, ranks: Ranks) -> dict[str, float]:
    """Return GiB that a backward needs of a token, by rate."""
    h = model.hidden / (ranks.tensor if ranks.sequence else 1)
    gate = (KEPT_FUSED_GATE if model.fused_activation else KEPT_GATE) if model.gated else KEPT_PLAIN
    dense = KEPT * h * model.pieces + model.attention * KEPT_ATTENTION * (model.queries + model.keys) / ranks.tensor
    dense += gate * (model.mlps * model.mlp + model.expert_layers * model.shared) / ranks.tensor
    routed = model.expert_layers * model.top * (model.hidden + KEPT_FUSED_GATE * model.expert)
    widths = {"kept": dense, "kept_experts": routed, "kept_mamba": model.mamba * model.inner / ranks.tensor}
    return {name: 2 * width / ranks.context / 2**30 for name, width in widths.items()}


def launches(model: LanguageModel) -> dict[str, tuple[float, float, float]]:
    """Return by rate what eager's host does: always, for a document, for a token."""
    return {
        "host_attention": (model.attention, 0.0, 0.0),
        "host_document": (0.0, model.attention * model.rotary_by_document, 0.0),
        "host_mlp": (model.mlps, 0.0, 0.0),
        "host_experts": (model.expert_layers, 0.0, 0.0),
        "host_routed": (0.0, 0.0, model.expert_layers / 1000),
        "host_mamba": (model.mamba, 0.0, 0.0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Largest relative error of records that were left out of the fit in turn.

    Attributes:
        graphs, eager, ratio, memory: Of the times, of one over the other, of the memory.
        records: How many there are.
    """

    graphs: float
    eager: float
    ratio: float
    memory: float | None
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a GPU, and where they come from.

    Attributes:
        files, date, gpu, commits: Of the records.
        ms: Milliseconds of a unit of each amount.
        host_ms: The same of the host.
        gib: GiB of each width that is kept, and "fixed".
        eager_busy: GPU time of eager over that of a replay, by kind.
        stall: What eager waits for the host where the GPU is the slower one, over the host's time.
        experts_eager_ms: Host time of a layer whose attention and router alone are on graphs.
        experts_eager_gib: Memory of such graphs over that of graphs with the experts inside.
        errors: By kind ("experts_eager" is such a layer's), and by the way in which ranks share it.
        left_out: Largest error of graphs where all records of a model are left out, by kind.
        tokens: The smallest and the largest pack.
        documents: The most documents of a pack.
        range: The least and the greatest of some amounts.
    """

    files: tuple[str, ...]
    date: str
    gpu: str
    commits: tuple[str, ...]
    ms: Mapping[str, float]
    host_ms: Mapping[str, float]
    gib: Mapping[str, float]
    eager_busy: Mapping[str, float]
    stall: float
    experts_eager_ms: float
    experts_eager_gib: float
    errors: Mapping[str, Errors]
    left_out: Mapping[str, float]
    tokens: tuple[int, int]
    documents: int
    range: Mapping[str, tuple[float, float]]

    @property
    def source(self) -> str:
        """Where they come from."""
        return f"{', '.join(self.files)}, {self.date}, {self.gpu}"


@cache
def measured() -> dict[str, Any]:
    """Return what the package has of the records."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@cache
def language_model_rates() -> Rates:
    """Return the rates of language models over packed documents."""
    return rates_of(measured()["language_model"])


def rates_of(found: Mapping[str, Any]) -> Rates:
    """Return rates from plain values."""
    return Rates(
        **{
            **found,
            **{name: tuple(found[name]) for name in ("files", "commits", "tokens")},
            "errors": {name: Errors(**values) for name, values in found["errors"].items()},
            "range": {name: tuple(values) for name, values in found["range"].items()},
        }
    )


def scaled(model: LanguageModel, ranks: Ranks, rates: Rates, whole: bool = True) -> CostModel:
    """Return what a microbatch of a model costs.

    Args:
        model: Its sizes.
        ranks: How ranks share it.
        rates: Of the GPU.
        whole: Whether experts are inside the region, too.

    Raises:
        NotMeasured: No record supports it.
    """
    errors = errors_of(model, ranks, rates, whole)
    check_range(model, ranks, rates)
    found = cost_of(model, ranks, rates, whole)
    return replace(found, origin=f"{found.origin}; {left_out(errors.graphs, errors.eager)}")


def left_out(graphs: float, eager: float) -> str:
    """Return in words how far records are from a fit that they were left out of."""
    return f"records left out of the fit are within {graphs:.0%} (graphs) and {eager:.0%} (eager)"


def errors_of(model: LanguageModel, ranks: Ranks, rates: Rates, whole: bool = True) -> Errors:
    """Return the errors of the records that are most like a model.

    Raises:
        NotMeasured: None is.
    """
    kind = model.kind if whole or model.kind != "experts" else EXPERTS_EAGER
    if ranks.shared and kind == EXPERTS_EAGER:
        raise NotMeasured(f"eager experts over ranks ({ranks}) were not measured")
    return rates.errors[ranks.shared or kind]


def cost_of(model: LanguageModel, ranks: Ranks, rates: Rates, whole: bool = True) -> CostModel:
    """Return the same of any model, however far from the records, without what ranks send if that was not measured."""
    parts = [(rates.ms[name], amount) for name, amount in amounts(model, ranks).items()]
    fixed, token, square, row = (sum(rate * amount[column] for rate, amount in parts) for column in range(4))
    memory = 1.0 if whole else rates.experts_eager_gib
    hosts = [(rates.host_ms[name], each) for name, each in launches(model).items()]
    host, document, of_token = (sum(rate * each[column] for rate, each in hosts) for column in range(3))
    return CostModel(
        origin=f"{model} by rates of {rates.source} only",
        fixed_ms=fixed,
        per_token_ms=token,
        per_square_ms=square,
        per_row_ms=row,
        replay_ms=0.0,
        graph_host_ms=0.0 if whole else rates.experts_eager_ms * model.expert_layers,
        host_ms=host,
        host_per_segment_ms=document,
        host_per_token_ms=of_token,
        eager_busy=rates.eager_busy[model.kind],
        stall_ms=0.0,
        stall_share=rates.stall,
        memory_fixed_mb=1024 * rates.gib["fixed"],
        memory_per_token_mb=1024 * memory * sum(rates.gib[name] * each for name, each in kept(model, ranks).items()),
    )


def check_range(model: LanguageModel, ranks: Ranks, rates: Rates) -> None:
    """Refuse a model that is far outside the records.

    Raises:
        NotMeasured: Says how far.
    """
    for name, value in ranged(model, ranks).items():
        least, most = rates.range[name]
        if not least / FAR <= value <= most * FAR:
            raise NotMeasured(f"{value:.3g} {name} are far from the measured {least:.3g} to {most:.3g}")


def ranged(model: LanguageModel, ranks: Ranks) -> dict[str, float]:
    """Return the amounts that tell how far a model is from others, on a rank."""
    return {
        "layers": model.pieces,
        "billion parameters on a GPU": parameters(model, ranks) / GIGA,
        "GFLOP a token": LINEAR_PASSES * products(model, ranks) / ranks.context / GIGA,
    }
