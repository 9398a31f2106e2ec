"""Measured whole steps: of full-size recipes, beside what the cost model says of them, and with whole-model graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bridge_cg_plugin.cli.explain.sizes import sizes_of
from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.rates import Rates, cost_of
from bridge_cg_plugin.cli.planner.shapes import language_model_of, ranks_of
from bridge_cg_plugin.cli.runs.results import measured_by_case
from bridge_cg_plugin.language.packed.fit import pack_buckets
from scripts.performance.models.language_model import split
from scripts.performance.packed.observations import observations
from scripts.performance.packed.rates import fit
from scripts.performance.runs.recipe_cases import CASES, LORA

FILE = "whole_step.jsonl"
_8B = "Qwen/Qwen3-VL-8B-Instruct"
# The models of the cases by their names on the hub.
MODELS = {"8b_sft_tp2": _8B, LORA: _8B, "30b_a3b_8_layers_ep2": "Qwen/Qwen3-VL-30B-A3B-Instruct"}
ADAPTERS = {LORA: "LoRA"}
# What Bridge's providers of these models set.
PROVIDER = {
    "bias_activation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cp_comm_type": None,
}
EXPERTS = {"Qwen/Qwen3-VL-30B-A3B-Instruct": 128}
SETTINGS = {"plugin": "exact", "plugin_fastest": "fastest"}
# Parts of a step: their names in records, and the fields with the statistics of their graphs.
VISION, LANGUAGE_MODEL = "vision", "language model"
STATISTICS = {"vision encoder": "graphs", LANGUAGE_MODEL: "packed_graphs"}
# Training with graphs of the whole language model; the record does not name the model.
WHOLE_MODEL_FILE, WHOLE_MODEL_CASE = "pretrain.jsonl", "mixed_full_iteration"
WHOLE_MODEL = "examples/photographs, Qwen3-VL's encoder with a language model of 4 layers of 2048"


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
    recipes = [step for case, modes in found.items() if case in MODELS for step in _of(case, modes, rates)]
    whole = measured_by_case(folder / WHOLE_MODEL_FILE).get(WHOLE_MODEL_CASE, {})
    return [*recipes, *_of_whole_model(whole)]


def _of(case: str, modes: Mapping[str, Mapping[str, Any]], rates: Rates) -> Iterator[dict[str, Any]]:
    recipe, adapter = CASES[case], ADAPTERS.get(case)
    held = SimpleNamespace(**_fields(case))
    model, ranks = language_model_of(held), ranks_of(held)
    eager = _eager(modes)
    for mode, setting in SETTINGS.items():
        graphs = modes.get(mode)
        if not eager or graphs is None or not graphs.get("packed_graphs"):
            continue
        comparable = adapter is None and "parts_ms" in graphs  # adapters are no part of the cost model
        yield {
            "case": case,
            "of": " ".join((recipe.recipe, *recipe.words)),
            "impl": "transformer_engine",
            "setting": setting,
            "adapter": adapter,
            "model": asdict(model),
            "ranks": asdict(ranks),
            **_times(FILE, eager, graphs),
            "samples": _samples(graphs),
            "pack": _pack(eager[0], graphs, cost_of(model, ranks, rates)) if comparable else None,
        }


def _of_whole_model(modes: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    eager, graphs = _eager(modes), modes.get("plugin")
    if eager and graphs is not None:
        named = {"case": WHOLE_MODEL_CASE, "of": WHOLE_MODEL, "impl": "full_iteration"}
        unknown = dict.fromkeys(("setting", "adapter", "model", "ranks", "samples", "pack"))
        yield {**named, **unknown, **_times(WHOLE_MODEL_FILE, eager, graphs)}


def _eager(modes: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the eager runs that were timed, the one that ratios are over first."""
    return [record for mode, record in sorted(modes.items()) if mode.startswith("eager") and record["ms"]]


def _times(file: str, eager: Sequence[Mapping[str, Any]], graphs: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a step was measured, its times, the GPU time of its parts, and the memory of its graphs."""
    names = zip(STATISTICS, (VISION, LANGUAGE_MODEL), strict=True) if "parts_ms" in graphs else ()
    return {
        "file": f"docs/benchmarks/{file}",
        "date": graphs["date"],
        "gpu": graphs["gpu"],
        "gpus": graphs.get("gpus", 1),
        "eager_runs_ms": [record["ms"] for record in eager],
        "graphs_ms": graphs["ms"],
        "parts_ms": {
            part: {"eager_runs": [run["parts_ms"][name] for run in eager], "graphs": graphs["parts_ms"][name]}
            for part, name in names
        },
        "memory_gb": {
            part: graphs[field]["memory_bytes"] / 2**30 for part, field in STATISTICS.items() if graphs.get(field)
        },
    }


def _samples(graphs: Mapping[str, Any]) -> int:
    samples: int = round(graphs["samples_per_s"] * graphs["ms"] / 1000)
    return samples


def _pack(eager: Mapping[str, Any], graphs: Mapping[str, Any], cost: CostModel) -> dict[str, Any]:
    """Return what a microbatch was measured and is forecast to take of rank 0's GPU."""
    counted = graphs["packed_graphs"]
    microbatches = (counted["replays"] + counted["warmup_microbatches"]) // len(graphs["step_ms"])
    samples = _samples(graphs) // microbatches
    packs = [_packs(name, found, samples) for name, found in counted["buckets"].items() if found["replays"]]
    largest = max(each.tokens for each in packs)
    return {
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
