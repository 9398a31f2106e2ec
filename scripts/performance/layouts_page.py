"""The table of docs/parallel.md: training over several GPUs, from the records of bench_parallel.py."""

from pathlib import Path
from typing import Any

from scripts.performance.markdown import Records, by_case, number, origin, share_of_spread, table
from scripts.performance.results import read_records

COMMAND = "python scripts/performance/bench_parallel.py --small --microbatches 2"


def layouts(records: Records) -> str:
    """Return a line for each layout: graphs beside eager in time, values, memory and scaling."""
    eager, graphs = (by_case(records, mode) for mode in ("eager1", "plugin"))
    rows = []
    for case, r in graphs.items():
        e = eager.get(case)
        runs = [each for each in records if each["case"] == case and each["mode"].startswith("eager")]
        peaks = ["/".join(f"{gb:.1f}" for gb in (each or {}).get("rank_peak_gb", ())) for each in (e, r)]
        rows.append(
            [case, r["microbatches"], len(r["losses"]), number(e, "ms", ".0f"), number(r, "ms", ".0f")]
            + [f"**{r['ratio']:.2f}**", *distances(r, runs), *peaks]
            + [number(e, "weak_scaling", ".2f"), number(r, "weak_scaling", ".2f")]
        )
    if not rows:
        return f"Not measured yet: `{COMMAND}` writes the records."
    header = ["layout", "microbatches", "steps", "eager ms", "graphs ms", "ratio", "losses", "gradient norms"]
    header += ["eager peak GiB", "graphs peak GiB", "eager scales", "graphs scale"]
    return f"{table(header, rows)}\n\n{origin([*graphs.values()])}"


def distances(graphs: dict[str, Any], eager: Records) -> list[str]:
    """Return how far losses and gradient norms are from eager's, as shares of the eager runs' spread."""
    return [share_of_spread([run[name] for run in eager], graphs[name]) for name in ("losses", "grad_norms")]


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
    return {"layouts": layouts(records), "slots": slots(records)}
