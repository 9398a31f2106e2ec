"""The tables of docs/benchmarks/parallel.md: training over several GPUs, from the records of bench_parallel.py."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.spread import each_by_others
from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.pages.markdown import Records, by_case, number, origin, table

COMMAND = "./run gpu-table"
# Cases of one GPU and of replicas of the model alone.
SCALES = re.compile(r"(?:one_GPU|DP\d+)((?:_small)?)")
VALUES = ("losses", "grad_norms")
# How far each run of a case is from the others, as a share of their spread, the graphed one's first; for each value.
Shares = list[list[float]]


def layouts(records: Records) -> str:
    """Return a line for each layout: graphs beside eager in time, values, memory and scaling."""
    records = [record for record in records if "ranks_per_gpu" not in record]
    eager, graphs = (by_case(records, mode) for mode in ("eager1", "plugin"))
    compared = {case: shares(r, records) for case, r in graphs.items()}
    rows, further = [], []
    for case, r in graphs.items():
        e = eager.get(case)
        times = [number(e, "ms", ".0f"), number(r, "ms", ".0f"), f"**{r['ratio']:.2f}**"]
        rows.append([case, r["microbatches"], len(r["losses"]), *times, *distances(compared[case])])
        further.append([case, *peaks(e, r), scaling(e, eager), scaling(r, graphs)])
    if not rows:
        return f"Not measured yet: `{COMMAND}` writes the records."
    header = ["layout", "microbatches", "steps", "eager ms", "graphs ms", "ratio", "losses", "gradient norms"]
    others = ["layout", "eager peak GiB", "graphs peak GiB", "eager scales", "graphs scale"]
    said = how_often_farthest([*compared.values()])
    return f"{table(header, rows)}\n\n{said}\n\n{table(others, further)}\n\n{origin([*graphs.values()])}"


def shared(records: Records) -> str:
    """Return a line for each layout whose ranks shared GPUs: values and memory of graphs and eager, without times."""
    records = [record for record in records if "ranks_per_gpu" in record and "error" not in record]
    eager, graphs = ({r["case"]: r for r in records if r["mode"] == mode} for mode in ("eager1", "plugin"))
    rows = [
        [case, r["ranks_per_gpu"], r["microbatches"], len(r["losses"]), *distances(shares(r, records))]
        + ["/".join(map(str, r[name])) for name in ("rank_replays", "rank_fallbacks")]
        + peaks(eager.get(case), r)
        for case, r in graphs.items()
    ]
    if not rows:
        return f"Not trained yet: on fewer than four GPUs `{COMMAND}` does it."
    header = ["layout", "ranks a GPU", "microbatches", "steps", "losses", "gradient norms", "replays", "fallbacks"]
    header += ["eager peak GiB", "graphs peak GiB"]
    return f"{table(header, rows)}\n\n{origin([*graphs.values()])}"


def peaks(*runs: dict[str, Any] | None) -> list[str]:
    """Return each run's peak memory in GiB, rank by rank; nothing of one that was not recorded."""
    return ["/".join(f"{gb:.1f}" for gb in (run or {}).get("rank_peak_gb", ())) for run in runs]


def shares(graphs: dict[str, Any], records: Records) -> Shares:
    """Compare every run of a case with the others.

    Args:
        graphs: The graphed run.
        records: With the case's eager runs.
    """
    eager = [each for each in records if each["case"] == graphs["case"] and each["mode"].startswith("eager")]
    found = []
    for name in VALUES:
        runs = [run[name] for run in (graphs, *eager)]
        found.append([judged.share for judged in each_by_others(runs)])
    return found


def distances(compared: Shares) -> list[str]:
    """Return how far losses and gradient norms are from the eager runs', as shares of the spread of these.

    In brackets is the same of the eager run that is farthest from all others.
    """
    return [f"{own:.2f} ({max(eager):.2f})" for own, *eager in compared]


def how_often_farthest(cases: Sequence[Shares]) -> str:
    """Return a sentence that says in how many comparisons the graphed run is farther from the others than each of them.

    Runs that do the same are each the farthest as often as any other.
    """
    found = [each for compared in cases for each in compared]
    count, chance = sum(own > max(eager) for own, *eager in found), sum(1 / len(each) for each in found)
    return (
        f"The graphed run is farther from the others than any eager run in {count} of {len(found)} comparisons; "
        f"by chance it would be in {chance:.0f}."
    )


def scaling(run: dict[str, Any] | None, runs: dict[str, dict[str, Any]]) -> str:
    """Return one GPU's time over a run's, where every GPU takes as many samples; nothing of other layouts.

    Args:
        run: A run's record.
        runs: Its mode's records by case; one GPU's counts if it is of the same commit and as many microbatches.
    """
    found = None if run is None else SCALES.fullmatch(run["case"])
    alone = None if found is None else runs.get(f"one_GPU{found[1]}")
    if run is None or alone is None:
        return ""
    like = [(each["microbatches"], each["versions"]["commit"]) for each in (run, alone)]
    return f"{alone['ms'] / run['ms']:.2f}" if like[0] == like[1] else ""


def balanced(records: Records) -> str:
    """Return a line for each layout whose ranks encoded images of others: graphs with and without that."""
    graphs, moved = (by_case(records, mode) for mode in ("plugin", "plugin_balanced"))
    rows = []
    for case, r in moved.items():
        own = graphs[case]
        apart = [number(each, "token_imbalance", ".2f") for each in (own, r)]
        rows.append([case, number(own, "ms", ".0f"), number(r, "ms", ".0f"), f"**{r['ms'] / own['ms']:.2f}**", *apart])
    header = ["layout", "graphs ms", "images moved, ms", "ratio", "token imbalance", "images moved"]
    return f"{table(header, rows)}\n\n{origin([*moved.values()])}" if rows else ""


def slots(records: Records) -> str:
    """Return what graphs take with few and with many microbatches; nothing where it was not measured."""
    found = [r for r in records if r["mode"] == "plugin_slots" and "error" not in r]
    rows = [[r["case"], r["microbatches"], r["replays"], f"{r['memory_gb']:.3f}"] for r in found]
    return f"{table(['layout', 'microbatches', 'replays', 'graphs GiB'], rows)}\n\n{origin(found)}" if rows else ""


def layout_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    records = read_records(folder / "parallel.jsonl")
    return {
        "layouts": layouts(records),
        "balanced": balanced(records),
        "shared": shared(records),
        "slots": slots(records),
    }
