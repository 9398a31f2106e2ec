"""docs/benchmarks/README.md and the README's results, from records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.spread import FACTOR, compare_to_spread
from bridge_cg_plugin.cli.runs.results import ROOT, read_records
from scripts.performance.models.workloads import CASES
from scripts.performance.pages.layouts_page import layout_parts
from scripts.performance.pages.loops_page import loops_parts
from scripts.performance.pages.markdown import (
    Records,
    by_case,
    fill,
    listed,
    number,
    origin,
    over_eager,
    stack,
    table,
)
from scripts.performance.pages.memory_page import memory_parts
from scripts.performance.pages.packed_page import packed_parts
from scripts.performance.pages.performance_page import by_default, performance_parts
from scripts.performance.pages.upstream_page import upstream_parts
from scripts.performance.pages.vision_page import encoder_parts, kernel_parts, vision_parts
from scripts.performance.pages.whole_step_page import whole_step_parts

FOLDER = ROOT / "docs/benchmarks"
HEAD = f"""`scripts/performance/tables.py` writes this page from the records beside it ([format](format.md)).
More tables: [vision encoder](vision.md), [GPU time and precision](kernels.md), [memory](memory.md),
[other encoders](encoders.md), [packed sequences](packed.md), [several GPUs](parallel.md), [whole steps](whole_step.md).
[Performance](../performance.md) has the conclusions for users.

Lines with a GPU and a date name releases only where they are others than {listed(stack())}."""
NOTES = "\n## Notes\n"  # of the page, written by hand

CAPTURES = """Captures of these runs: seconds in all; from the last warm-up step to the first step with a replay; the
most that a later step waited; microbatches on graphs from the 10th step after warm-up on. Empty: not in the record."""


def speed(records: Records) -> str:
    """Return the encoder's times with exact kernels and with default options."""
    eager, default = by_case(records, "eager"), {r["case"]: r for r in by_default(records)}
    rows = [
        [r["case"], r["tokens"], number(eager[r["case"]], "ms"), number(r, "ms"), f"**{over_eager(r, eager)}**"]
        + [number(default.get(r["case"]), "ms"), over_eager(default.get(r["case"]), eager)]
        for r in _exact(records)
    ]
    return table(["case", "tokens", "eager ms", "exact kernels ms", "ratio", "default ms", "ratio"], rows)


def exactness(records: Records) -> str:
    """Return the encoder's differences from eager and its memory."""
    eager, default = by_case(records, "eager"), {r["case"]: r for r in by_default(records)}
    rows = [
        [r["case"], number(r, "forward_rel", ".0e"), number(r, "grad_rel", ".1e")]
        + [number(default.get(r["case"]), "grad_rel", ".1e"), number(r, "grad_noise", ".1e")]
        + [number(eager[r["case"]], "eager_memory_gb"), number(r, "memory_gb"), number(r, "added_share", ".1%")]
        for r in _exact(records)
    ]
    header = ["case", "outputs differ by", "gradients differ by", "gradients by default", "two eager runs"]
    return table([*header, "eager peak GiB", "slot GiB", "half as large a bucket adds"], rows)


def _exact(records: Records) -> Records:
    """Return the records of exact kernels that have an eager one beside them, in the order of the cases."""
    found, eager = by_case(records, "plugin"), by_case(records, "eager")
    return [found[case] for case in CASES if case in found and case in eager]


def parity(records: Records) -> str:
    """Return the worst figures of the parity runs by mode."""
    rows = []
    for mode in dict.fromkeys(r["mode"] for r in records):
        of_mode = [r for r in records if r["mode"] == mode]
        replayed = [r for r in of_mode if r["bucket"]]
        equal = sum(r["forward_rel"] == 0 for r in replayed)
        rows.append(
            [mode, len(replayed), equal, f"{max(r['forward_rel'] for r in replayed):.0e}"]
            + [f"{max(r['grad_rel'] for r in replayed):.1e}", f"{max(r['grad_noise'] for r in replayed):.1e}"]
            + [", ".join(f"{r['case']} ({r['fallback']})" for r in of_mode if r["fallback"]) or "none"]
        )
    return table(
        [
            "mode",
            "mixes replayed",
            "outputs bit-equal",
            "worst output",
            "worst gradient",
            "two eager runs",
            "ran eager",
        ],
        rows,
    )


def training(records: Records) -> str:
    """Return the whole runs, each graphed one compared with all eager runs of its case."""
    rows = []
    for r, eager in _with_eager(records):
        own = [e["ms"] for e in eager if e["versions"]["commit"] == r["versions"]["commit"] and e["ms"]]
        shares = [compare_to_spread([e[key] for e in eager], r[key]).share for key in ("losses", "grad_norms")]
        rows.append(
            [r["case"], release(r), len(r["losses"]), f"{min(own):.0f}", f"{r['ms']:.0f}", f"**{r['ratio']:.2f}**"]
            + [len(eager), *(f"{share:.2f}" for share in shares)]
        )
    header = ["case", "Bridge", "steps", "eager ms", "graphs ms", "ratio", "eager runs", "losses", "gradient norms"]
    return table(header, rows)


def captures(records: Records) -> str:
    """Return how long the whole runs captured, how soon they were on graphs, and how far."""
    rows = [
        [r["case"], release(r), number(r["graphs"], "capture_seconds"), number(r, "first_graphed_s")]
        + [number(r["graphs"], "longest_pause"), number(r, "settled_graph_share", ".1%")]
        for r, _ in _with_eager(records)
    ]
    header = ["case", "Bridge", "capture s", "s to the first graphed step", "longest pause s", "on graphs later"]
    return table(header, rows)


def training_memory(records: Records) -> str:
    """Return the peaks of device memory of the whole runs."""
    rows = [
        [r["case"], release(r), number(eager[0], "peak_gb"), number(r, "peak_gb")] for r, eager in _with_eager(records)
    ]
    return table(["case", "Bridge", "eager peak GiB", "graphs peak GiB"], rows)


def _with_eager(records: Records) -> list[tuple[dict[str, Any], Records]]:
    """Return every graphed run with the eager runs of its case and release."""
    found = []
    for r in (r for r in records if r["mode"] == "plugin"):
        same = [e for e in records if (e["case"], release(e)) == (r["case"], release(r))]
        found.append((r, [e for e in same if e["mode"].startswith("eager")]))
    return found


# Cases of the tower that the README names.
SHOWN = ("1x448", "8mix")
WHOLE_STEPS = {"mixed_full_iteration": "optimizer step, encoder and language model"}


def headline(bench: Records, runs: Records) -> str:
    """Return a few of the tower's times with default options, and of whole optimizer steps, in one table."""
    eager, found = by_case(bench, "eager"), {r["case"]: r for r in by_default(bench)}
    rows = [
        [f"vision encoder, {r['tokens']} tokens", f"{eager[case]['ms']:.0f}", f"{r['ms']:.0f}"]
        + [f"**{over_eager(r, eager)}**", "outputs bit-equal" if r["forward_rel"] == 0 else f"{r['forward_rel']:.0e}"]
        for case, r in ((case, found[case]) for case in SHOWN if case in found and case in eager)
    ]
    steps = [r for r in runs if r["mode"] == "plugin" and release(r) == newest(runs)]
    for r in (r for r in steps if r["case"] in WHOLE_STEPS):
        ms = f"{r['ms'] / r['ratio']:.0f}"
        inside = f"{len(r['losses'])} losses inside eager's spread" if r["inside_spread"] else "another loss"
        rows.append([WHOLE_STEPS[r["case"]], ms, f"{r['ms']:.0f}", f"**{r['ratio']:.2f}**", inside])
    return table(["forward and backward", "eager ms", "on graphs ms", "ratio", "beside eager"], rows)


def newest(runs: Records) -> str:
    """Return the newest release of Bridge in some records."""
    return max(map(release, runs), key=lambda name: tuple(map(int, name.split("."))))


def release(record: dict[str, Any]) -> str:
    """Return the release of Bridge that a record was measured with."""
    return str(record["versions"]["megatron-bridge"])


def autoload(records: Records) -> str:
    """Return what loading the plugin adds to processes that import PyTorch only."""
    rows = [[r["mode"], f"{r['ms']:.0f}", r["load_ms"], r["load_cpu_ms"], r.get("added_ms", "")] for r in records]
    columns = table(["plugin", "process ms", "PyTorch loads plugins, ms", "CPU ms of it", "added ms"], rows)
    return (
        "Median time of processes that import PyTorch but not Bridge, alternately with the plugin off\n"
        f"(`BRIDGE_CG_PLUGIN=0`) and on. {origin(records)}\n\n{columns}\n"
    )


def summary(bench: Records, mixes: Records, runs: Records) -> str:
    """Return the results that the README shows: times of the encoder, parity, and whole training runs."""
    return f"""Forward plus backward of Qwen3-VL's full vision encoder: 27 layers, 576 M parameters, bf16. Gradients are
accumulated into fp32 `main_grad`. Each bucket has exactly the size of its case. Times are medians. {origin(bench)}

{speed(bench)}

Mixes of images and video, from one set of captures or, `on_demand`, buckets that mixes ask for. {origin(mixes)}

{parity(mixes)}

Optimizer steps of Bridge's `pretrain()` with the full encoder and a language model of 4 layers of 2048. Each of 4
microbatches has 1 to 3 photographs of mixed size. `overlap_grad_reduce` and `overlap_param_gather` are on. Losses and
gradient norms: the largest distance to the nearest eager run, over the largest difference of two eager runs up to that
step. At most {FACTOR} counts as equal to eager. {origin(runs)}

{training(runs)}"""


def results_parts(folder: Path) -> dict[str, str]:
    """Return the parts of the README and of the documentation's first page by the names of their marks.

    Args:
        folder: With the records.
    """
    bench, runs = (read_records(folder / f"{name}.jsonl") for name in ("vision_bench", "pretrain"))
    whole = [r for r in runs if r["mode"] == "plugin" and r["case"] in WHOLE_STEPS]
    return {"results": f"{headline(bench, runs)}\n\n{origin([*bench, *whole], with_stack=True)}" if bench else ""}


# Each page with marks, and what stands between them.
PAGES: dict[str, Callable[[Path], dict[str, str]]] = {
    "README.md": results_parts,
    "docs/index.md": results_parts,
    "docs/performance.md": performance_parts,
    "docs/upstream_graphs.md": upstream_parts,
    "docs/other_loops.md": loops_parts,
    "docs/benchmarks/packed.md": packed_parts,
    "docs/benchmarks/parallel.md": layout_parts,
    "docs/benchmarks/vision.md": vision_parts,
    "docs/benchmarks/kernels.md": kernel_parts,
    "docs/benchmarks/memory.md": memory_parts,
    "docs/benchmarks/encoders.md": encoder_parts,
    "docs/benchmarks/whole_step.md": whole_step_parts,
}


def write_pages() -> None:
    """Write docs/benchmarks/README.md, and what is written from records on other pages."""
    bench, mixes, runs, loading = (
        read_records(FOLDER / f"{name}.jsonl") for name in ("vision_bench", "vision_parity", "pretrain", "autoload")
    )
    shown = summary(bench, mixes, runs)
    _, _, notes = (FOLDER / "README.md").read_text().partition(NOTES)
    sections = [
        f"# Measured results\n\n{HEAD}",
        f"## Summary\n\n{shown}\n\nPeak device memory of these runs:\n\n{training_memory(runs)}\n\n{CAPTURES}\n\n"
        f"{captures(runs)}",
        f"## Differences and memory of the encoder\n\n{exactness(bench)}",
        f"## Loading the plugin\n\n{autoload(loading)}".rstrip(),
        f"{NOTES.lstrip()}{notes}",
    ]
    (FOLDER / "README.md").write_text("\n\n".join(sections))
    for name, parts in PAGES.items():
        page = ROOT / name
        page.write_text(fill(page.read_text(), parts(FOLDER)))
