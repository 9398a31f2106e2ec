"""The table of docs/parallel.md: training over several GPUs, from the records of bench_parallel.py."""

from pathlib import Path

from scripts.performance.markdown import Records, by_case, number, origin, table
from scripts.performance.results import read_records

COMMAND = "python scripts/performance/bench_parallel.py --small --microbatches 2"


def layouts(records: Records) -> str:
    """Return a line for each layout: graphs beside eager in time, values, memory and scaling."""
    eager, graphs = (by_case(records, mode) for mode in ("eager1", "plugin"))
    rows = []
    for case, r in graphs.items():
        e = eager.get(case)
        peaks = ["/".join(f"{gb:.1f}" for gb in (each or {}).get("rank_peak_gb", ())) for each in (e, r)]
        rows.append(
            [case, r["microbatches"], len(r["losses"]), number(e, "ms", ".0f"), number(r, "ms", ".0f")]
            + [f"**{r['ratio']:.2f}**", "inside" if r["inside_spread"] else "**outside**", *peaks]
            + [number(e, "weak_scaling", ".2f"), number(r, "weak_scaling", ".2f")]
        )
    if not rows:
        return f"Not measured yet: `{COMMAND}` writes the records."
    header = ["layout", "microbatches", "steps", "eager ms", "graphs ms", "ratio", "eager's spread"]
    header += ["eager peak GiB", "graphs peak GiB", "eager scales", "graphs scale"]
    return f"{table(header, rows)}\n\n{origin([*graphs.values()])}"


def layout_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    return {"layouts": layouts(read_records(folder / "parallel.jsonl"))}
