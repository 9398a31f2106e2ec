"""Measured steps of full-size recipes, beside what the cost model says of their language models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bridge_cg_plugin.language.packed.fit import pack_buckets
from bridge_cg_tools.benchmarks.models.language_model import split
from bridge_cg_tools.benchmarks.packed.observations import observations
from bridge_cg_tools.benchmarks.packed.rates import fit
from bridge_cg_tools.benchmarks.records.results import measured_by_case
from bridge_cg_tools.benchmarks.runs.recipe_cases import CASES
from bridge_cg_tools.explain.sizes import sizes_of
from bridge_cg_tools.planner.rates import Rates, cost_of
from bridge_cg_tools.planner.shapes import language_model_of, ranks_of

FILE = "whole_step.jsonl"
# The models of the cases by their names on the hub; adapters are no part of the cost model.
MODELS = {"8b_sft_tp2": "Qwen/Qwen3-VL-8B-Instruct", "30b_a3b_8_layers_ep2": "Qwen/Qwen3-VL-30B-A3B-Instruct"}
# What Bridge's providers of these models set.
PROVIDER = {
    "bias_activation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cp_comm_type": None,
}
EXPERTS = {"Qwen/Qwen3-VL-30B-A3B-Instruct": 128}
SETTINGS = {"plugin": "exact", "plugin_fastest": "fastest"}
LANGUAGE_MODEL = "language model"


class Packs(NamedTuple):
    """What was replayed of a bucket: its tokens and limits, tokens of a usual pack's documents, how often."""

    tokens: int
    limits: tuple[int, ...]
    lengths: Sequence[int]
    replays: int


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the measured steps of a folder's records, as plain values."""
    found = measured_by_case(folder / FILE)
    rates = fit(observations(folder))
    return [step for case, modes in found.items() if case in MODELS for step in _of(case, modes, rates)]


def _of(case: str, modes: Mapping[str, Mapping[str, Any]], rates: Rates) -> Iterator[dict[str, Any]]:
    eager = modes.get("eager1")
    for mode, setting in SETTINGS.items():
        graphs = modes.get(mode)
        if eager is None or graphs is None or not graphs.get("packed_graphs"):
            continue
        yield {
            "case": case,
            "setting": setting,
            "file": f"docs/benchmarks/{FILE}",
            "date": graphs["date"],
            "gpu": graphs["gpu"],
            "gpus": graphs["gpus"],
            "eager_ms": eager["ms"],
            "graphs_ms": graphs["ms"],
            "language_model": _language_model(case, eager, graphs, rates),
        }


def _language_model(case: str, eager: Mapping[str, Any], graphs: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """Return the model, its ranks, and what a microbatch was measured and is forecast to take of rank 0's GPU."""
    counted = graphs["packed_graphs"]
    microbatches = (counted["replays"] + counted["warmup_microbatches"]) // len(graphs["step_ms"])
    samples = round(graphs["samples_per_s"] * graphs["ms"] / 1000 / microbatches)
    packs = [_packs(name, found, samples) for name, found in counted["buckets"].items() if found["replays"]]
    held = SimpleNamespace(**_fields(case))
    model, ranks = language_model_of(held), ranks_of(held)
    cost = cost_of(model, ranks, rates)
    largest = max(each.tokens for each in packs)
    return {
        "model": asdict(model),
        "ranks": asdict(ranks),
        "tokens": largest,
        "documents": samples,
        "eager_ms": eager["parts_ms"][LANGUAGE_MODEL] / microbatches,
        "graphs_ms": graphs["parts_ms"][LANGUAGE_MODEL] / microbatches,
        "memory_gb": counted["memory_bytes"] / 2**30,
        "forecast": {
            "eager_ms": _mean(packs, lambda each: cost.eager_ms(each.lengths)),
            "graphs_ms": _mean(packs, lambda each: cost.graph_ms(each.tokens, each.lengths, *each.limits)),
            "memory_gb": cost.memory_gb(largest),
        },
    }


def _packs(name: str, found: Mapping[str, Any], samples: int) -> Packs:
    tokens, documents, _ = map(int, name.split("/"))
    lengths = split(round(found["tokens"] / found["replays"]), samples)
    limits = next(each.limits for each in pack_buckets([tokens], documents) if each.limits[1] >= max(lengths))
    return Packs(tokens, limits, lengths, found["replays"])


def _mean(packs: Sequence[Packs], ms: Callable[[Packs], float]) -> float:
    """Return the mean over replays."""
    return sum(each.replays * ms(each) for each in packs) / sum(each.replays for each in packs)


def _fields(case: str) -> dict[str, Any]:
    """Return the fields of the case's provider that sizes and ranks are read from."""
    name = MODELS[case]
    words: Sequence[str] = CASES[case].words
    set_there = {word.partition("=")[0].removeprefix("model."): int(word.partition("=")[2]) for word in words}
    return {**PROVIDER, "num_moe_experts": EXPERTS.get(name), **sizes_of(name), **set_there}
