"""Fitting the cost model of Qwen3-VL's vision encoder to records, and how far it is from those that were left out."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.attention_bounds import SIDE_STREAM_UP_TO
from bridge_cg_plugin.cli.planner.cost import MILLION, CostModel
from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.measuring.least_squares import HOST_BOUND, least_relative
from scripts.performance.models.workloads import CASES, one_image

FILE = "vision_bench.jsonl"
# Encoders with the layers of Qwen3-VL's, by how their cases in another file begin.
ALIKE_FILE, ALIKE = "encoders.jsonl", {"Qwen3.5-VL encoder of 27 layers of 1152": "qwen35_vl_"}
# The smallest microbatch; below, everything is launches.
LEAST = 784
# A host was busier while these ran eager.
BUSY_HOST = ("tokens_1024",)
ORIGIN = {
    "default": "Qwen3-VL's vision encoder (27 layers of 1152) with default options",
    "exact": "Qwen3-VL's vision encoder (27 layers of 1152) with kernels that round as eager's do, on one stream",
}


class Ran(NamedTuple):
    """A microbatch, eager and on graphs.

    Attributes:
        frames: Patches of each.
        eager, graphs: The records.
    """

    frames: tuple[int, ...]
    eager: Mapping[str, Any]
    graphs: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Patches in all."""
        return sum(self.frames)


def measured(folder: Path, kernels: str) -> list[Ran]:
    """Return what was measured with default kernels, or with exact ones."""
    records = [record for record in read_records(folder / FILE) if "error" not in record]
    modes = {(record["case"], record["mode"]): record for record in records}
    return list(_exact(modes) if kernels == "exact" else _default(modes))


def _default(modes: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Ran]:
    """Yield the cases as options are by default: fast kernels, on two streams where "auto" has two."""
    for (case, mode), eager in modes.items():
        if mode != "eager" or (case not in CASES and eager["tokens"] <= SIDE_STREAM_UP_TO):
            continue
        fast = modes.get((case, "plugin_fast"))
        graphs = modes.get((case, "plugin_streams"), fast) if eager["tokens"] <= SIDE_STREAM_UP_TO else fast
        if graphs is not None:
            yield _ran(eager, graphs)


def _exact(modes: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Ran]:
    for (case, mode), eager in modes.items():
        graphs = modes.get((case, "plugin"))
        if mode == "eager" and graphs is not None and eager["tokens"] >= LEAST and case not in BUSY_HOST:
            yield _ran(eager, graphs)


def _ran(eager: Mapping[str, Any], graphs: Mapping[str, Any]) -> Ran:
    grid = CASES.get(eager["case"]) or one_image(eager["tokens"])
    return Ran(tuple(h * w for count, h, w in grid for _ in range(count)), eager, graphs)


def fit(found: Sequence[Ran], origin: str) -> CostModel:
    """Return the cost model that fits microbatches best by relative error."""
    squares = [sum(n * n for n in ran.frames) / MILLION for ran in found]
    busy = least_relative(
        ("fixed", "token", "square"),
        [
            ({"fixed": 1.0, "token": ran.tokens, "square": square}, ran.graphs["ms"], 0.0)
            for ran, square in zip(found, squares, strict=True)
        ],
    )
    bound = [ran for ran in found if ran.eager["ms"] > HOST_BOUND * ran.eager["gpu_busy_ms"]]
    others = [ran for ran in found if ran not in bound]
    host = least_relative(
        ("fixed", "segment"),
        [({"fixed": 1.0, "segment": len(ran.frames)}, ran.eager["ms"], 0.0) for ran in bound],
    )
    ratio = statistics.median(ran.eager["gpu_busy_ms"] / ran.graphs["ms"] for ran in others or found)
    stalls = [ran.eager["ms"] - ratio * ran.graphs["ms"] for ran in others] or [0.0]
    memory = least_relative(
        ("fixed", "token"),
        [({"fixed": 1.0, "token": ran.tokens}, 1024 * ran.graphs["memory_gb"], 0.0) for ran in found],
    )
    return CostModel(
        origin=origin,
        fixed_ms=busy["fixed"],
        per_token_ms=busy["token"],
        per_square_ms=busy["square"],
        per_row_ms=0.0,
        replay_ms=0.0,
        host_ms=host["fixed"],
        host_per_segment_ms=host["segment"],
        eager_busy=ratio,
        stall_ms=max(statistics.median(stalls), 0.0),
        memory_fixed_mb=memory["fixed"],
        memory_per_token_mb=memory["token"],
    )


def fitted(folder: Path) -> dict[str, Any]:
    """Return the cost models that the records of a folder give, with their errors, as plain values."""
    found = {kernels: _fitted(measured(folder, kernels), ORIGIN[kernels]) for kernels in ORIGIN}
    exact = CostModel(**found["exact"]["cost"])
    return {**found, "alike": {name: _alike(folder, prefix, exact) for name, prefix in ALIKE.items()}}


def _alike(folder: Path, prefix: str, cost: CostModel) -> dict[str, Any]:
    """Return how far an encoder's records with exact kernels are from a cost model that was fitted to another's."""
    records = [record for record in read_records(folder / ALIKE_FILE) if record["case"].startswith(prefix)]
    modes = {(record["case"], record["mode"]): record for record in records}
    found = [_of_case(eager, modes[case, "plugin"], prefix) for (case, mode), eager in modes.items() if mode == "eager"]
    errors = [_errors(cost, ran) for ran in found]
    return {
        "file": f"docs/benchmarks/{ALIKE_FILE}",
        "date": max(record["date"] for record in records),
        "records": len(found),
        **{name: max(each[name] for each in errors) for name in errors[0]},
    }


def _of_case(eager: Mapping[str, Any], graphs: Mapping[str, Any], prefix: str) -> Ran:
    grid = CASES[eager["case"].removeprefix(prefix).rpartition("_")[0]]
    return Ran(tuple(h * w for count, h, w in grid for _ in range(count)), eager, graphs)


def _fitted(found: Sequence[Ran], origin: str) -> dict[str, Any]:
    records = [record for ran in found for record in (ran.eager, ran.graphs)]
    (gpu,) = {record["gpu"] for record in records}
    date, file = max(record["date"] for record in records), f"docs/benchmarks/{FILE}"
    return {
        "cost": asdict(fit(found, f"{origin}, measured on {gpu} only: {file} of {date}")),
        "fit": {
            "file": file,
            "date": date,
            "gpu": gpu,
            "tokens": [min(ran.tokens for ran in found), max(ran.tokens for ran in found)],
            **errors_of(found),
        },
    }


def errors_of(found: Sequence[Ran]) -> dict[str, float]:
    """Return the largest relative errors of microbatches that are left out of the fit one by one.

    The smallest and the largest stay: outside of them there is no forecast.
    """
    far: dict[str, list[float]] = {}
    ends = [end(found, key=lambda ran: ran.tokens) for end in (min, max)]
    for ran in (each for each in found if each not in ends):
        cost = fit([other for other in found if other is not ran], "")
        for name, error in _errors(cost, ran).items():
            far.setdefault(name, []).append(error)
    return {name: max(values) for name, values in far.items()}


def _errors(cost: CostModel, ran: Ran) -> dict[str, float]:
    """Return the relative errors of a cost model for a microbatch."""
    eager, graphs = cost.eager_ms(ran.frames), cost.graph_ms(ran.tokens, ran.frames, 1, 1)
    pairs = {
        "eager": (eager, ran.eager["ms"]),
        "graphs": (graphs, ran.graphs["ms"]),
        "ratio": (graphs / eager, ran.graphs["ms"] / ran.eager["ms"]),
        "memory": (cost.memory_gb(ran.tokens), ran.graphs["memory_gb"]),
    }
    return {name: abs(predicted / measured_value - 1) for name, (predicted, measured_value) in pairs.items()}
