"""Write docs/benchmarks/README.md and the table of the project's README from the records.

python scripts/performance/tables.py
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.attention_bounds import SIDE_STREAM_UP_TO
from scripts.performance.records import read_records

FOLDER = ROOT / "docs" / "benchmarks"
NOTES = "## Notes\n"
LAYERS = re.compile(r"_\d+layers$")
Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        heading: Above it.
        field: Of a record; `over_eager` is `ms` over the time that the column of eager shows.
        modes: Of the same case, the first that was recorded; the row's own where empty.
    """

    heading: str
    field: str
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the page, with a row for each case and mode.

    Attributes:
        title: Of its section.
        file: The records.
        text: What ran.
        columns: What is shown; one without a figure is left out.
        modes: Those that have a row.
        cases: Those that are shown, by pieces of their names.
    """

    title: str
    file: str
    text: str
    columns: tuple[Column, ...]
    modes: tuple[str, ...] = ("plugin",)
    cases: tuple[str, ...] = ("",)


EAGER = ("eager", "eager1", "none")
EAGER_MS = Column("eager ms", "ms", EAGER)
MS, RATIO, GIB = Column("graphs ms", "ms"), Column("ratio", "ratio"), Column("GiB", "memory_gb")
TABLES = (
    Table(
        "Vision encoder",
        "vision_bench.jsonl",
        "Forward plus backward of Qwen3-VL's full encoder ([modes](vision.md)). Outputs with exact and default\n"
        "kernels are bit-equal.",
        (
            Column("tokens", "tokens"),
            EAGER_MS,
            Column("upstream ms", "ms", ("upstream",)),
            Column("exact ms", "ms", ("plugin",)),
            Column("default ms", "ms"),
            Column("ratio", "over_eager"),
            Column("FlashAttention ms", "ms", ("plugin_flash",)),
            GIB,
            Column("gradients", "grad_rel"),
            Column("upstream's", "grad_rel", ("upstream",)),
            Column("two eager runs", "grad_noise"),
        ),
        ("default",),
        ("1x448", "1x768", "4x448", "8mix", "video16", "1x2048"),
    ),
    Table(
        "Other encoders",
        "encoders.jsonl",
        "Forward plus backward at full size. Records of Hugging Face's encoders with exact kernels, bit-equal here, "
        "are from\nbefore 2026-11-29: since then these are [near fp32](../encoders.md).",
        (
            EAGER_MS,
            Column("default ms", "ms", ("plugin_fast",)),
            Column("exact ratio", "ratio"),
            Column("default ratio", "ratio", ("plugin_fast",)),
            GIB,
        ),
        cases=(
            *("vl_1x448", "nemotron_omni_1x448", "9mix", "glm45v_1x8192", "35_vl_8mix", "25_vl_8mix"),
            *("_30_s", "18_clips", "siglip_1", "siglip_2", "1_tile", "8_tiles"),
        ),
    ),
    Table(
        "Packed documents",
        "packed.jsonl",
        "Forward plus backward of a pack of 5 documents. `plugin_whole` has experts on graphs too.",
        (EAGER_MS, Column("GPU busy", "gpu_busy_ms", EAGER), MS, RATIO, GIB, Column("bit-equal", "bit_equal")),
        ("plugin", "plugin_whole"),
        ("dense_2", "dense_8", "fp8_2", "fp8_8", "moe_2", "moe_8", "large", "mamba_2", "mamba_8"),
    ),
    Table(
        "Steps of Bridge's pretrain()",
        "steps.jsonl",
        "Optimizer steps of 4 microbatches with Qwen3-VL's full encoder and a language model of layers x hidden size.",
        (
            EAGER_MS,
            Column("upstream ms", "ms", ("upstream",)),
            MS,
            RATIO,
            Column("upstream's losses", "loss_rel", ("upstream",)),
            Column("losses", "loss_rel"),
        ),
    ),
    Table(
        "Recipes",
        "whole_step.jsonl",
        "Optimizer steps of Bridge's recipes ([cases](steps.md)).",
        (
            Column("GPUs", "gpus"),
            EAGER_MS,
            MS,
            RATIO,
            Column("losses", "loss_rel"),
            Column("inside spread", "inside_spread"),
            Column("peak GiB", "peak_gb"),
        ),
    ),
    Table(
        "Offload and recompute",
        "offload.jsonl",
        "Replays that offload, recompute, or have a target of N % of the memory (`mixed_N`), over graphs that keep\n"
        "all activations. Outputs are bit-equal.",
        (RATIO, Column("share of memory", "memory_ratio"), Column("host GiB", "pinned_gb")),
        ("offload", "recompute", "mixed_25", "mixed_30", "mixed_35", "mixed_40", "mixed_60"),
    ),
    Table(
        "Other loops",
        "loops.jsonl",
        "Rounds of reinforcement learning: the encoder (`plugin`) or packed layers too (`plugin_packed`) on graphs.",
        (EAGER_MS, MS, RATIO, Column("inside spread", "inside_spread")),
        ("plugin", "plugin_packed"),
    ),
)
# Of the project's README: what runs, on what, the records, the case, and the mode.
README_ROWS = (
    ("Qwen3-VL 8B, SFT", "2 H200, TP2", "whole_step.jsonl", "8b_sft_tp2", "plugin"),
    ("Qwen3-VL 8B, LoRA", "1 H200", "whole_step.jsonl", "8b_lora", "plugin"),
    ("Qwen3.5-VL 9B, LoRA, packs", "1 H200", "whole_step.jsonl", "qwen35_9b_lora_packed", "plugin"),
    ("Qwen3.5-VL 9B, SFT, 8 of 32 layers", "1 H200", "whole_step.jsonl", "qwen35_9b_8_layers_padded", "plugin"),
    ("Gemma 3 4B, SFT", "1 H200", "whole_step.jsonl", "gemma3_4b", "plugin"),
    ("Qwen3-VL 30B-A3B, 8 of 48 layers", "2 H200, EP2", "whole_step.jsonl", "30b_a3b_8_layers_ep2", "plugin"),
    ("a round of verl, 4 layers of 2048", "1 H100", "loops.jsonl", "verl", "plugin"),
    ("Qwen3-VL's encoder, one image of 448 x 448", "1 H200", "vision_bench.jsonl", "1x448", "plugin"),
    ("Qwen3-VL's encoder, 8 images of mixed sizes", "1 H200", "vision_bench.jsonl", "8mix", "plugin"),
    ("Qwen3.5-VL's encoder, 8 images of mixed sizes", "1 H200", "encoders.jsonl", "qwen35_vl_8mix", "plugin"),
    ("Qwen2.5-VL's encoder, 8 images of mixed sizes", "1 H200", "encoders.jsonl", "qwen25_vl_8mix", "plugin"),
)
# Eager's step in ms on hosts whose records were not kept.
OTHER_HOSTS = {"8b_sft_tp2": (1590,), "8b_lora": (3267,)}
MEASURED = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)
HEAD = """# Measured results

`scripts/performance/tables.py` writes this page from the records beside it ([format](format.md)). More:
[vision encoder](vision.md), [whole steps](steps.md), [several GPUs](parallel.md).

Times are medians in ms, `ratio` is over eager's in the same run. `gradients` and `losses` are the largest relative
difference from eager's. `1x448` is one image of 448 x 448 pixels, `8mix` eight of mixed sizes, `video16` 16 frames of
320 x 320.
"""


def with_default(records: Records) -> Records:
    """Return the records and, as mode `default`, those of the mode that default options are for a case's size."""
    streams = {True: "plugin_streams", False: "plugin_fast"}
    chosen = [r for r in records if r["mode"] == streams[r.get("tokens", 0) <= SIDE_STREAM_UP_TO]]
    return [*records, *({**r, "mode": "default"} for r in chosen)]


def table(records: Records, columns: Sequence[Column], modes: Sequence[str]) -> str:
    """Return a table of records, a row for each case and each of these modes; columns without a figure are left out."""
    by_mode = {(r["case"], r["mode"]): r for r in records}
    cases = dict.fromkeys(r["case"] for r in records)
    found = [(case, mode) for case in cases for mode in modes if (case, mode) in by_mode]
    cells = [[value_of(by_mode, case, mode, column) for column in columns] for case, mode in found]
    shown = [i for i in range(len(columns)) if any(row[i] is not None for row in cells)]
    several = len({mode for _, mode in found}) > 1
    heading = ["case", *(["mode"] if several else []), *(columns[i].heading for i in shown)]
    rows: list[Iterable[str]] = [heading, ["---"] * len(heading)]
    for (case, mode), values in zip(found, cells, strict=True):
        rows.append([LAYERS.sub("", case), *([mode] if several else []), *(written(values[i]) for i in shown)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def value_of(by_mode: dict[tuple[str, str], dict[str, Any]], case: str, mode: str, column: Column) -> Any:
    """Return a column's figure in the row of a case and mode, None without one."""
    record = next((by_mode[case, m] for m in column.modes or (mode,) if (case, m) in by_mode), {})
    if column.field == "over_eager":
        eager = next(by_mode[case, m] for m in EAGER if (case, m) in by_mode)
        return record["ms"] / eager["ms"]
    return record.get(column.field)


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
        for r in with_default(read_records(folder / shown.file))
        if "error" not in r and any(piece in r["case"] for piece in shown.cases)
    ]
    modes = {*shown.modes, *(mode for column in shown.columns for mode in column.modes)}
    sources = [r for r in found if r["mode"] in modes]
    text = table(found, shown.columns, shown.modes)
    return f"## {shown.title}\n\n{shown.text}\n{origin(sources)}\n\n{text}\n" if sources else ""


def page(folder: Path, before: str) -> str:
    """Return the page of a folder's records; what follows `NOTES` is written by hand and stays."""
    _, mark, by_hand = before.partition(NOTES)
    return "\n".join(filter(None, [HEAD, *(section(each, folder) for each in TABLES), mark + by_hand]))


def readme(folder: Path, before: str) -> str:
    """Return the project's README with the table of its rows."""
    found = [_readme_row(folder, *row) for row in README_ROWS]
    heading = ("a step of", "on", "eager ms", "on graphs ms", "faster", "peak GiB, eager to graphs")
    rows = [heading, ["---"] * len(heading), *found]
    return MEASURED.sub("".join(f"| {' | '.join(row)} |\n" for row in rows), before)


def _readme_row(folder: Path, what: str, gpus: str, file: str, case: str, mode: str) -> tuple[str, ...]:
    records = [r for r in read_records(folder / file) if LAYERS.sub("", r["case"]) == case and "error" not in r]
    graphs = next(r for r in records if r["mode"] == mode)
    eager = [r for r in records if r["mode"] in ("eager", "none") or re.fullmatch(r"eager\d", r["mode"])]
    times = [*(r["ms"] for r in eager), *OTHER_HOSTS.get(case, ())]
    times = sorted({f"{t:.0f}": t for t in (min(times), max(times))}.values())
    gains = dict.fromkeys(f"{t / graphs['ms']:.1f}" for t in times)
    peak = f"{max(r['peak_gb'] for r in eager):.1f} to {graphs['peak_gb']:.1f}" if "peak_gb" in graphs else ""
    ms = (" to ".join(f"{t:.0f}" for t in times), f"{graphs['ms']:.0f}")
    return what, gpus, *ms, f"**{' to '.join(gains)}x**", peak


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for file, write in ((FOLDER / "README.md", page), (ROOT / "README.md", readme)):
        file.write_text(write(FOLDER, file.read_text()))
