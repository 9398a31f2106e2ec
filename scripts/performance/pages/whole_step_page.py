"""The tables of docs/benchmarks/whole_step.md: steps of full-size recipes, from the records of bench_recipe.py."""

from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.measuring.step_times import PARTS
from scripts.performance.models.arithmetic import TFLOPS
from scripts.performance.pages.markdown import Records, code, number, picture, table, with_origin
from scripts.performance.runs.recipe_cases import SCALING

EAGER = "eager1"
COMMAND = "scripts/performance/bench_recipe.py"


def shown(records: Records) -> Records:
    """Return the measured records but for repeated eager runs, each case's together."""
    cases = list(dict.fromkeys(r["case"] for r in records))
    found = [r for r in records if "error" not in r and (r["mode"] == EAGER or not r["mode"].startswith("eager"))]
    return sorted(found, key=lambda r: (cases.index(r["case"]), r["mode"] != EAGER, -r["ms"]))


def mode_in_words(record: dict[str, Any]) -> str:
    """Return a record's mode; which of the eager runs it is says nothing."""
    return "eager" if record["mode"] == EAGER else str(record["mode"])


def limit_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the ms that the arithmetic of each part takes at `TFLOPS`."""
    return {part: tflop / TFLOPS * 1e3 for part, tflop in record.get("parts_tflop", {}).items()}


def steps(records: Records) -> str:
    """Return times, memory and the distance from eager."""
    rows = []
    for r in shown(records):
        runs = sum(e["case"] == r["case"] and e["mode"].startswith("eager") for e in records if "error" not in e)
        inside = {True: f" (inside eager's of {runs})", False: f" (**outside** eager's of {runs})", None: ""}
        rows.append(
            [r["case"], r["gpus"], mode_in_words(r), number(r, "ms", ".0f"), f"**{r['ratio']:.2f}**"]
            + [number(r, "tflops_per_gpu", ".0f"), number(r, "idle_share", ".1%"), number(r, "peak_gb", ".0f")]
            + [f"{r['loss_rel']:.0e}{inside[r.get('inside_spread')]}"]
        )
    header = ["case", "GPUs", "mode", "ms", "ratio", "TFLOP/s a GPU", "GPU idle", "peak GiB", "losses differ by"]
    return table(header, rows) if rows else ""


def failures(records: Records) -> str:
    """Return the runs that failed."""
    rows = [[r["case"], r["mode"], code(r["error"])] for r in records if "error" in r]
    return table(["case", "mode", "error"], rows) if rows else ""


def parts(records: Records) -> str:
    """Return ms by part of the step, beside what arithmetic takes."""
    found, rows = [r for r in shown(records) if "parts_ms" in r], []
    for r in found:
        rows.append([r["case"], mode_in_words(r), *(f"{r['parts_ms'][part]:.0f}" for part in PARTS)])
        rows[-1].append(f"{sum(r['parts_ms'].values()):.0f}")
    for case, limit in {r["case"]: limit_of(r) for r in found}.items():
        cells = [f"{limit[part]:.0f}" if part in limit else "" for part in PARTS]
        rows.append([case, f"arithmetic at {TFLOPS} TFLOP/s", *cells, f"{sum(limit.values()):.0f}"])
    rows.sort(key=lambda row: [r["case"] for r in found].index(row[0]))
    return table(["case", "ms of", *PARTS, "in all"], rows) if rows else ""


def families(records: Records) -> str:
    """Return ms by family of kernels: a table for each case."""
    found, made = [r for r in shown(records) if r.get("families")], []
    for case in dict.fromkeys(r["case"] for r in found):
        runs = [r for r in found if r["case"] == case]
        largest = {name: max(r["families"].get(name, 0.0) for r in runs) for r in runs for name in r["families"]}
        rows = [[name, *(number(r["families"], name, ".0f") for r in runs)] for name in _descending(largest)]
        rows.append(["GPU busy", *(number(r, "gpu_busy_ms", ".0f") for r in runs)])
        rows.append(["kernels", *(r["kernels"] for r in runs)])
        made.append(table([f"{case}, ms", *map(mode_in_words, runs)], rows))
    return "\n\n".join(made)


def _descending(values: dict[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -values[name])


def scaling(records: Records) -> str:
    """Return how much of one GPU's speed each of several has, eager and on graphs, and what its step waits for."""
    found = [r for r in shown(records) if r["case"] in SCALING]
    alone = {r["mode"]: r for r in found if r["gpus"] == 1}
    rows = [
        [r["gpus"], mode_in_words(r), f"{r['images_per_s'] / r['gpus']:.1f}"]
        + [f"**{r['images_per_s'] / r['gpus'] / alone[r['mode']]['images_per_s']:.2f}**"]
        + [number(r, "idle_share", ".1%"), f"{r.get('families', {}).get('communication', 0.0):.0f}"]
        for r in sorted(found, key=lambda r: (r["mode"] != EAGER, r["mode"], r["gpus"]))
        if r["mode"] in alone
    ]
    if len({row[0] for row in rows}) < 2:
        return f"Not measured yet: `{COMMAND}` does it."
    header = ["GPUs", "mode", "images/s of a GPU", "over one GPU", "GPU idle", "communication ms"]
    return with_origin(table(header, rows), found)


def whole_step_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records and the plots.
    """
    records = read_records(folder / "whole_step.jsonl")
    return {
        "whole-steps": with_origin(steps(records), shown(records)) or f"Not measured yet: `{COMMAND}` does it.",
        "whole-step-failures": failures(records),
        "step-parts": parts(records),
        "step-parts-plot": picture(folder, "whole_step.svg", "ms of a step by part, eager, on graphs and arithmetic"),
        "step-families": families(records),
        "step-scaling": scaling(records),
    }
