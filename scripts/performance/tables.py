"""Write docs/benchmarks/README.md from the records beside it.

python scripts/performance/tables.py
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import read_records

FOLDER = ROOT / "docs" / "benchmarks"
NOTES = "## Notes\n"
Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the page.

    Attributes:
        title: Of its section.
        file: The records.
        text: What ran.
        fields: Of a record, one a column.
        modes: Those that are shown; all where one is empty.
        cases: Those that are shown, by the beginning of their names.
    """

    title: str
    file: str
    text: str
    fields: tuple[str, ...]
    modes: tuple[str, ...] = ("",)
    cases: tuple[str, ...] = ("",)


TABLES = (
    Table(
        "Vision encoder",
        "vision_bench.jsonl",
        "Forward plus backward of Qwen3-VL's full vision encoder: 27 layers, 576 M parameters, bf16. Gradients are\n"
        "accumulated into fp32 `main_grad`. Each bucket has exactly the size of its case (`bench_vision.py`).",
        ("tokens", "ms", "ratio", "host_ms", "gpu_busy_ms", "memory_gb", "forward_rel", "grad_rel", "grad_noise"),
        ("eager", "plugin", "plugin_fast", "plugin_streams", "plugin_flash", "upstream"),
        ("1x448", "1x768", "4x448", "8mix", "video16", "1x2048"),
    ),
    Table(
        "Other encoders",
        "encoders.jsonl",
        "Forward plus backward of other encoders at full size (`bench_vision.py --encoders`).",
        ("tokens", "ms", "ratio", "gpu_busy_ms", "memory_gb", "forward_rel", "grad_rel", "grad_noise"),
    ),
    Table(
        "Packed documents",
        "packed.jsonl",
        "Forward plus backward of a pack of 5 documents (`bench_packed.py`).",
        ("tokens", "ms", "ratio", "gpu_busy_ms", "memory_gb", "bit_equal", "forward_rel", "grad_rel", "grad_noise"),
        cases=("dense", "fp8", "moe", "large", "mamba"),
    ),
    Table(
        "Steps of Bridge's pretrain()",
        "steps.jsonl",
        "Optimizer steps of 4 microbatches with Qwen3-VL's full encoder and a language model of layers x hidden size\n"
        "(`bench_step.py`).",
        ("ms", "ratio", "loss_rel", "peak_gb"),
    ),
    Table(
        "Recipes",
        "whole_step.jsonl",
        "Optimizer steps of Bridge's recipes, eager several times and on graphs (`bench_recipe.py`).",
        ("gpus", "ms", "ratio", "loss_rel", "inside_spread", "tflops_per_gpu", "peak_gb"),
    ),
    Table(
        "Offload and recompute",
        "offload.jsonl",
        "Replays of the same batches with all activations kept (`none`), offloaded, recomputed, or as a memory target\n"
        "asks (`bench_offload.py`).",
        ("tokens", "slots", "ms", "ratio", "memory_gb", "memory_ratio", "pinned_gb", "bit_equal", "grad_rel"),
    ),
    Table(
        "Other loops",
        "loops.jsonl",
        "Rounds of reinforcement learning (`bench_loops.py`).",
        ("ms", "ratio", "graph_share", "inside_spread", "training_equal", "peak_gb"),
    ),
    Table(
        "Captures",
        "vision_captures.jsonl",
        "Seconds that training waits for one recording of Qwen3-VL's encoder (`bench_captures.py`).",
        ("tokens", "ms", "grad_rel", "replays"),
    ),
)
HEAD = """# Measured results

`scripts/performance/tables.py` writes this page from the records beside it ([format](format.md)).
More measurements, with the tables of their time: [vision encoder](vision.md), [GPU time and precision](kernels.md),
[memory](memory.md), [other encoders](encoders.md), [packed sequences](packed.md), [several GPUs](parallel.md),
[whole steps](whole_step.md). [Performance](../performance.md) has the conclusions for users.

Times are medians in ms. `ratio` is the time over eager's. `forward_rel` and `grad_rel` are the largest relative
difference from eager of an output and of a gradient, `grad_noise` that of two eager runs.
"""


def table(records: Records, fields: Sequence[str]) -> str:
    """Return a table of records, a row for each case and mode; fields that no record has are left out."""
    shown = [name for name in fields if any(r.get(name) is not None for r in records)]
    rows: list[Iterable[str]] = [["case", "mode", *shown], ["---"] * (2 + len(shown))]
    rows += [[r["case"], r["mode"], *(written(r.get(name)) for name in shown)] for r in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def written(value: Any) -> str:
    """Return a figure as text: three digits, small ones as powers of ten."""
    if value is None or isinstance(value, bool | str | int):
        return "" if value is None else str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1e}" if abs(value) < 0.01 else f"{value:.3g}"


def origin(records: Records) -> str:
    """Return one line with GPUs, dates and commits."""
    commits = dict.fromkeys(r["versions"]["commit"] for r in records)
    dates = dict.fromkeys(end(r["date"] for r in records) for end in (min, max))
    gpus = dict.fromkeys("no GPU" if r["gpu"] == "none" else r["gpu"] for r in records)
    return f"{' and '.join(gpus)}, {' to '.join(dates)}, commit {', '.join(commits)}."


def section(shown: Table, folder: Path) -> str:
    """Return a table's section of the page; empty without records."""
    found = [
        r
        for r in read_records(folder / shown.file)
        if "error" not in r and r["case"].startswith(shown.cases) and (r["mode"] in shown.modes or "" in shown.modes)
    ]
    order = list(dict.fromkeys(r["case"] for r in found))
    found.sort(key=lambda r: order.index(r["case"]))
    return f"## {shown.title}\n\n{shown.text}\n{origin(found)}\n\n{table(found, shown.fields)}\n" if found else ""


def page(folder: Path, before: str) -> str:
    """Return the page of a folder's records; what follows `NOTES` is written by hand and stays."""
    _, mark, by_hand = before.partition(NOTES)
    return "\n".join(filter(None, [HEAD, *(section(each, folder) for each in TABLES), mark + by_hand]))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    file = FOLDER / "README.md"
    file.write_text(page(FOLDER, file.read_text()))
