"""What the records of packed language models say for the cost model."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.cli.planner.packing import Pack
from bridge_cg_plugin.cli.planner.plan import place
from bridge_cg_plugin.cli.planner.shapes import LanguageModel, Ranks
from bridge_cg_plugin.cli.runs.results import measured_by_case
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.language.packed.fit import pack_buckets
from scripts.performance.models.language_model import (
    EXPERTS_OF_RANKS,
    SHAPES,
    TOP_K_OF_RANKS,
    sizes_of,
    split,
)
from scripts.performance.packed.plans import COSTS, NAMES, PLAN, drawn

PACKED, PARALLEL = "packed.jsonl", "packed_parallel.jsonl"
DOCUMENTS, DOCUMENTS_OF_RANKS = 5, 8
# Layouts of two GPUs, as cases are named, and the model of each.
LAYOUTS = {
    "TP2": Ranks(tensor=2),
    "TP2_sequence": Ranks(tensor=2, sequence=True),
    "CP2": Ranks(context=2),
    "CP2_a2a": Ranks(context=2, exchange="a2a"),
    "EP2": Ranks(expert=2),
}
# Case -> mode -> record.
type Cases = Mapping[str, Mapping[str, Mapping[str, Any]]]
GRAPHS = {"moe": "plugin_whole"}
_PACK = re.compile(r"([a-z]+)_(\d+)")
_COSTS = re.compile(rf"{COSTS}([a-z]+)_(\d+)x(\d+)")


class Ran(NamedTuple):
    """A pack, and what it ran on.

    Attributes:
        lengths: Tokens of its documents.
        bucket: The recording's tokens and limits.
    """

    lengths: Pack
    bucket: Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One case, eager and on graphs.

    Attributes:
        case: Its name.
        name: The model's; records of one are left out together.
        model, ranks: Its sizes and how ranks share it.
        packs: What ran, each as often as the others; times are means of them.
        graphs_ms: Time on graphs.
        memory_gb: Memory of the graphs, in GiB; None where records do not have it.
        eager_ms, busy_ms: Time eager; time in which the GPU worked then. None likewise.
        partial_ms, partial_gb: Time and memory with attention and router on graphs and experts eager; None likewise.
        records: The records.
    """

    case: str
    name: str
    model: LanguageModel
    ranks: Ranks
    packs: tuple[Ran, ...]
    graphs_ms: float
    memory_gb: float | None = None
    eager_ms: float | None = None
    busy_ms: float | None = None
    partial_ms: float | None = None
    partial_gb: float | None = None
    records: tuple[Mapping[str, Any], ...] = ()


def observations(folder: Path) -> list[Observation]:
    """Return what the records of a folder say of the GPU that most of them are of; what one GPU ran comes first."""
    alone, shared = measured_by_case(folder / PACKED), measured_by_case(folder / PARALLEL)
    found = [*_of_packs(alone), *_of_plans(alone), *_of_ranks(shared)]
    counts = Counter(record["gpu"] for each in found for record in each.records)
    most = {gpu for gpu, _ in counts.most_common(1)}
    return [each for each in found if {record["gpu"] for record in each.records} == most]


def _of_packs(cases: Cases) -> Iterator[Observation]:
    for case, modes in cases.items():
        found = _PACK.fullmatch(case) or _COSTS.fullmatch(case)
        if found is None or found[1] not in SHAPES or "eager" not in modes:
            continue
        name, tokens, by_shape = found[1], int(found[2]), found.re is _COSTS
        lengths = split(tokens, int(found[3]) if by_shape else DOCUMENTS)
        eager, partial = modes["eager"], modes.get("plugin") if name in GRAPHS and not by_shape else None
        graphs = modes.get("plugin" if by_shape else GRAPHS.get(name, "plugin"))
        bucket = place(lengths, pack_buckets([tokens], len(lengths)))
        if graphs is None or isinstance(bucket, Fallback):
            continue
        yield Observation(
            case=case,
            name=name,
            model=sizes_of(SHAPES[name]),
            ranks=Ranks(),
            packs=(Ran(lengths, bucket),),
            graphs_ms=graphs["ms"],
            memory_gb=graphs["memory_gb"],
            eager_ms=eager["ms"],
            busy_ms=eager["gpu_busy_ms"],
            partial_ms=None if partial is None else partial["ms"],
            partial_gb=None if partial is None else partial["memory_gb"],
            records=tuple(record for record in (graphs, eager, partial) if record is not None),
        )


def _of_plans(cases: Cases) -> Iterator[Observation]:
    """Yield the recommended choice of each distribution, whose packs all replay.

    What took them eager is left out: it is the host's time, and plans ran on other hosts than packs.
    """
    for case, modes in cases.items():
        if not case.startswith(PLAN):
            continue
        model, _, distribution = case.removeprefix(PLAN).rpartition("_")
        model = model or "planned"
        if distribution not in NAMES or model not in SHAPES:
            continue
        packs = drawn(distribution)
        graphs = _ran(packs, modes.get("plugin"))
        if graphs is None:
            continue
        yield Observation(
            case=case,
            name=model,
            model=sizes_of(SHAPES[model]),
            ranks=Ranks(),
            packs=graphs,
            graphs_ms=modes["plugin"]["ms"],
            records=(modes["plugin"],),
        )


def _places(packs: Iterable[Pack], record: Mapping[str, Any]) -> list[Bucket | Fallback]:
    buckets = pack_buckets([int(tokens) for tokens in record["bucket"].split(",")], record["max_packed_seqs"])
    return [place(pack, buckets) for pack in packs]


def _ran(packs: Sequence[Pack], record: Mapping[str, Any] | None) -> tuple[Ran, ...] | None:
    """Return the packs with what each ran on; None where one ran eager."""
    found = [] if record is None else list(zip(packs, _places(packs, record), strict=True))
    ran = tuple(Ran(pack, bucket) for pack, bucket in found if isinstance(bucket, Bucket))
    return ran if ran and len(ran) == len(found) else None


def _of_ranks(cases: Cases) -> Iterator[Observation]:
    for case, modes in cases.items():
        layout, _, tokens = case.rpartition("_")
        if layout not in LAYOUTS or "plugin" not in modes or "eager" not in modes:
            continue
        each = int(tokens) // DOCUMENTS_OF_RANKS
        lengths = (each,) * DOCUMENTS_OF_RANKS
        shape, changes = (
            (EXPERTS_OF_RANKS, {"moe_router_topk": TOP_K_OF_RANKS}) if layout == "EP2" else (SHAPES["dense"], {})
        )
        bucket = place(lengths, pack_buckets([int(tokens)], DOCUMENTS_OF_RANKS))
        if isinstance(bucket, Fallback):
            continue
        yield Observation(
            case=case,
            name=layout,
            model=sizes_of(shape, **changes),
            ranks=LAYOUTS[layout],
            packs=(Ran(lengths, bucket),),
            graphs_ms=modes["plugin"]["ms"],
            eager_ms=modes["eager"]["ms"],
            records=(modes["plugin"], modes["eager"]),
        )
