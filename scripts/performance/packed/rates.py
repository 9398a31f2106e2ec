"""Fitting rates of language models to records, and how far these are from records that were left out of the fit."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.attention_bounds import scan_cost
from bridge_cg_plugin.cli.planner.cost import MILLION
from bridge_cg_plugin.cli.planner.rates import EXPERTS_EAGER, Errors, Rates, amounts, cost_of, kept, launches, ranged
from scripts.performance.measuring.least_squares import HOST_BOUND, least_relative
from scripts.performance.packed.observations import PACKED, PARALLEL, Observation, observations

# Rows that attention's backward scans, in ms of a billion rows times width: 4.3 ms for 32 x 4096 rows, 17 ms for 512 x
# 1024, of the vision encoder's 27 layers of 1152. Packs of few documents do not tell it from the rest.
ROWS_MS, MANY_DOCUMENTS = 1.05, 100
# A single record tells nothing of pieces and bytes: both explain it to this.
MUCH_BETTER, EXACT = 0.5, 1e-12
ALONE = ("pieces", "parameters", "products", "attention", "bytes", "scan")
KEPT = ("kept", "kept_experts", "kept_mamba")
HOST = ("host_attention", "host_document", "host_mlp", "host_experts", "host_routed", "host_mamba")
SHARED = ("tensor", "sequence", "ring", "all_to_all", "expert_ranks")


def fitted(folder: Path) -> dict[str, Any]:
    """Return the rates that the records of a folder give, with their errors, as plain values."""
    found = observations(folder)
    rates = fit(found)
    errors = errors_of(found)
    return asdict(replace(rates, errors=errors, left_out=left_out(found)))


def fit(found: Sequence[Observation]) -> Rates:
    """Return the rates that fit observations best by relative error; without errors."""
    alone = [each for each in found if not each.ranks.shared]
    ms = _alone(alone)
    ms |= _shared(found, ms)
    measured = [each for each in alone if each.memory_gb is not None]
    gib = least_relative(
        ("fixed", *KEPT), [({"fixed": 1.0, **_kept(each)}, each.memory_gb or 0.0, 0.0) for each in measured]
    )
    eager = [each for each in alone if each.eager_ms is not None]
    bound = [each for each in eager if each.busy_ms is None or (each.eager_ms or 0.0) > HOST_BOUND * each.busy_ms]
    host_ms = least_relative(HOST, [(_launched(each), each.eager_ms or 0.0, 0.0) for each in bound])
    busy = _eager_busy(alone)
    stalls = [_stall(each, host_ms, busy) for each in eager if each not in bound]
    partial = [each.partial_ms / each.model.expert_layers for each in alone if each.partial_ms is not None]
    records = [record for each in found for record in each.records]
    return Rates(
        files=tuple(f"docs/benchmarks/{name}" for name in (PACKED, PARALLEL)),
        date=max(record["date"] for record in records),
        gpu=_one({record["gpu"] for record in records}),
        commits=tuple(sorted({record["versions"]["commit"] for record in records})),
        ms=ms,
        host_ms=host_ms,
        gib=gib,
        eager_busy=busy,
        stall=statistics.median(stalls) if stalls else 0.0,
        experts_eager_ms=statistics.median(partial) if partial else 0.0,
        experts_eager_gib=statistics.median(_partial_gib(alone) or [1.0]),
        errors={},
        left_out={},
        tokens=(min(_tokens(each) for each in found), max(_tokens(each) for each in found)),
        documents=max(len(ran.lengths) for each in found for ran in each.packs),
        range=_range(found),
    )


def _alone(found: Sequence[Observation]) -> dict[str, float]:
    """Return the rates of one GPU; that of rows only from packs of many documents."""
    many = any(len(ran.lengths) >= MANY_DOCUMENTS for each in found for ran in each.packs)
    if many:
        return least_relative((*ALONE, "rows"), [(_done(each), each.graphs_ms, 0.0) for each in found])
    done = [(_done(each), each.graphs_ms) for each in found]
    known = [(amount, whole, ROWS_MS * amount["rows"]) for amount, whole in done]
    return {**least_relative(ALONE, known), "rows": ROWS_MS}


def errors_of(found: Sequence[Observation]) -> dict[str, Errors]:
    """Return the largest errors of records that are left out one by one, by kind or by how ranks share the model."""
    far: dict[str, list[_Far]] = {}
    for each in found:
        rates = fit([other for other in found if other is not each])
        far.setdefault(each.ranks.shared or each.model.kind, []).append(_far(each, rates))
        if each.partial_ms is not None:
            partial = replace(each, graphs_ms=each.partial_ms, memory_gb=each.partial_gb)
            far.setdefault(EXPERTS_EAGER, []).append(_far(partial, rates, whole=False))
    return {
        name: Errors(
            graphs=max(one.graphs for one in group),
            eager=max(one.eager for one in group if one.eager is not None),
            ratio=max(one.ratio for one in group if one.ratio is not None),
            memory=max((one.memory for one in group if one.memory is not None), default=None),
            records=len(group),
        )
        for name, group in far.items()
    }


def left_out(found: Sequence[Observation]) -> dict[str, float]:
    """Return the largest error of graphs of models all of whose records are left out, by kind."""
    far: dict[str, float] = {}
    for name in dict.fromkeys(each.name for each in found if not each.ranks.shared):
        group = [each for each in found if each.name == name]
        rates = fit([other for other in found if other.name != name])
        rates = replace(rates, eager_busy={group[0].model.kind: 1.0, **rates.eager_busy})
        worst = max(_far(each, rates).graphs for each in group)
        far[group[0].model.kind] = max(worst, far.get(group[0].model.kind, 0.0))
    return far


class _Far(NamedTuple):
    """Relative errors of one observation; None where it was not measured."""

    graphs: float
    eager: float | None
    ratio: float | None
    memory: float | None


def _far(each: Observation, rates: Rates, whole: bool = True) -> _Far:
    cost = cost_of(each.model, each.ranks, rates, whole)
    graphs = statistics.mean(cost.graph_ms(ran.bucket.tokens, ran.lengths, *ran.bucket.limits) for ran in each.packs)
    eager = statistics.mean(cost.eager_ms(ran.lengths) for ran in each.packs)
    memory = cost.memory_gb(max(ran.bucket.tokens for ran in each.packs))
    return _Far(
        graphs=_off(graphs, each.graphs_ms),
        eager=None if each.eager_ms is None else _off(eager, each.eager_ms),
        ratio=None if each.eager_ms is None else _off(graphs / eager, each.graphs_ms / each.eager_ms),
        memory=None if each.memory_gb is None else _off(memory, each.memory_gb),
    )


def _off(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def _shared(found: Sequence[Observation], ms: Mapping[str, float]) -> dict[str, float]:
    """Return the rate of each way to share a model: by pieces, or by bytes where that explains records much better."""
    rates = {f"{way}_{unit}": 0.0 for way in SHARED for unit in ("pieces", "bytes")}
    for way in SHARED:
        done = [(_done(each), each.graphs_ms) for each in found if each.ranks.shared == way]
        known = [(amount, whole, sum(rate * amount[name] for name, rate in ms.items())) for amount, whole in done]
        if known:
            pieces, sent = (_least_of_one(f"{way}_{unit}", known) for unit in ("pieces", "bytes"))
            by_bytes = sent.left < MUCH_BETTER * pieces.left and pieces.left > EXACT
            rates[f"{way}_{'bytes' if by_bytes else 'pieces'}"] = (sent if by_bytes else pieces).rate
    return rates


class _One(NamedTuple):
    """A rate, and the sum of squared relative errors that it leaves."""

    rate: float
    left: float


def _least_of_one(name: str, known: Sequence[tuple[Mapping[str, float], float, float]]) -> _One:
    rate = least_relative((name,), known)[name]
    return _One(rate, sum(((rest + rate * amount[name]) / whole - 1) ** 2 for amount, whole, rest in known))


def _done(each: Observation) -> dict[str, float]:
    """Return the amounts of an observation, means of its packs."""
    every = amounts(each.model, each.ranks)
    sizes = [
        (ran.bucket.tokens, sum(n * n for n in ran.lengths) / MILLION, scan_cost(*ran.bucket.limits) / MILLION)
        for ran in each.packs
    ]
    return {name: statistics.mean(amount.of(*size) for size in sizes) for name, amount in every.items()}


def _kept(each: Observation) -> dict[str, float]:
    return {name: width * _tokens(each) for name, width in kept(each.model, each.ranks).items()}


def _launched(each: Observation) -> dict[str, float]:
    documents = statistics.mean(len(ran.lengths) for ran in each.packs)
    tokens = statistics.mean(sum(ran.lengths) for ran in each.packs)
    return {name: fixed + d * documents + t * tokens for name, (fixed, d, t) in launches(each.model).items()}


def _eager_busy(found: Iterable[Observation]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {}
    for each in found:
        if each.busy_ms is not None:
            ratios.setdefault(each.model.kind, []).append(each.busy_ms / each.graphs_ms)
    return {kind: statistics.median(values) for kind, values in ratios.items()}


def _stall(each: Observation, host_ms: Mapping[str, float], busy: Mapping[str, float]) -> float:
    host = sum(host_ms[name] * amount for name, amount in _launched(each).items())
    return max(((each.eager_ms or 0.0) - busy[each.model.kind] * each.graphs_ms) / host, 0.0)


def _partial_gib(found: Iterable[Observation]) -> list[float]:
    return [each.partial_gb / each.memory_gb for each in found if each.partial_gb and each.memory_gb]


def _tokens(each: Observation) -> int:
    return max(ran.bucket.tokens for ran in each.packs)


def _range(found: Iterable[Observation]) -> dict[str, tuple[float, float]]:
    values: dict[str, list[float]] = {}
    for each in found:
        for name, value in ranged(each.model, each.ranks).items():
            values.setdefault(name, []).append(value)
    return {name: (min(some), max(some)) for name, some in values.items()}


def _one(values: set[str]) -> str:
    (value,) = values
    return value
