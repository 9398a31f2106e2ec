"""docs/benchmarks/README.md and the README's results, from records."""

from typing import Any

from bridge_cg_plugin.attention_bounds import SIDE_STREAM_UP_TO
from bridge_cg_tools.benchmarks.models.workloads import CASES
from bridge_cg_tools.benchmarks.pages.layouts_page import layout_parts
from bridge_cg_tools.benchmarks.pages.markdown import Records, by_case, fill, origin, over_eager, table
from bridge_cg_tools.benchmarks.pages.packed_page import packed_parts
from bridge_cg_tools.benchmarks.pages.performance_page import page_parts
from bridge_cg_tools.benchmarks.records.results import ROOT, read_records
from bridge_cg_tools.report.spread import compare_to_spread

FOLDER = ROOT / "docs/benchmarks"
PAGE = ROOT / "docs/performance.md"
PACKED = FOLDER / "packed.md"
PARALLEL = FOLDER / "parallel.md"
HEAD = """Written by `scripts/performance/tables.py` from the records beside it, which [format](format.md) describes.
All modes, plots, and what remains above the limit are in [performance](../performance.md)."""


def speed(records: Records) -> str:
    """Return the tower's times with exact kernels and, where they were measured, with default options."""
    eager, fast, streams, found = (
        by_case(records, mode) for mode in ("eager", "plugin_fast", "plugin_streams", "plugin")
    )
    default = fast | {case: r for case, r in streams.items() if r["tokens"] <= SIDE_STREAM_UP_TO}
    rows = []
    for r in (found[case] for case in CASES if case in found and case in eager):
        memory = f"{r['memory_gb']:.1f}" if "memory_gb" in r else ""
        share = f"{r['added_share']:.1%}" if "added_share" in r else ""
        rows.append(
            [r["case"], r["tokens"], f"{eager[r['case']]['ms']:.1f}", f"{r['ms']:.1f}", f"**{over_eager(r, eager)}**"]
            + [f"{r['forward_rel']:.0e}", f"{r['grad_rel']:.1e}", f"{r['grad_noise']:.1e}"]
            + (
                [f"{f['ms']:.1f} ({over_eager(f, eager)})", f"{f['grad_rel']:.1e}"]
                if (f := default.get(r["case"]))
                else [""] * 2 * bool(default)
            )
            + [f"{r['eager_memory_gb']:.1f}", memory, share]
        )
    header = ["case", "tokens", "eager ms", "exact kernels ms", "ratio", "outputs differ by", "gradients differ by"]
    header += ["two eager runs", *(["default ms (ratio)", "its gradients"] if default else [])]
    return table([*header, "eager peak GiB", "slot GiB", "half as large a bucket adds"], rows)


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
    for r in (r for r in records if r["mode"] == "plugin"):
        same = [e for e in records if (e["case"], release(e)) == (r["case"], release(r))]
        eager = [e for e in same if e["mode"].startswith("eager")]
        own = [e["ms"] for e in eager if e["versions"]["commit"] == r["versions"]["commit"] and e["ms"]]
        shares = [compare_to_spread([e[key] for e in eager], r[key]).share for key in ("losses", "grad_norms")]
        rows.append(
            [r["case"], release(r), r["versions"]["commit"], len(r["losses"]), f"{min(own):.0f}", f"{r['ms']:.0f}"]
            + [f"**{r['ratio']:.2f}**", len(eager), *(f"{share:.2f}" for share in shares)]
            + [f"{eager[0]['peak_gb']:.1f}", f"{r['peak_gb']:.1f}"]
        )
    header = [
        "case",
        "Bridge",
        "commit",
        "steps",
        "eager ms",
        "graphs ms",
        "ratio",
        "eager runs",
        "losses",
        "gradient norms",
    ]
    return table([*header, "eager peak GiB", "graphs peak GiB"], rows)


def release(record: dict[str, Any]) -> str:
    """Return the release of Bridge that a record was measured with."""
    return str(record["versions"]["megatron-bridge"])


def autoload(records: Records) -> str:
    """Return what loading the plugin adds to processes that import PyTorch only."""
    rows = [[r["mode"], f"{r['ms']:.0f}", r["load_ms"], r["load_cpu_ms"], r.get("added_ms", "")] for r in records]
    columns = table(["plugin", "whole process ms", "PyTorch's loading of plugins ms", "its CPU ms", "added ms"], rows)
    return (
        "Processes that import PyTorch and never Bridge, with the plugin off (`BRIDGE_CG_PLUGIN=0`) and on in turn,\n"
        f"medians. {origin(records)}\n\n{columns}\n"
    )


def write_pages() -> None:
    """Write docs/benchmarks/README.md, and what is written from records in the README and in docs."""
    bench, mixes, runs, loading = (
        read_records(FOLDER / f"{name}.jsonl") for name in ("vision_bench", "vision_parity", "pretrain", "autoload")
    )
    body = f"""Forward plus backward of Qwen3-VL's full-size vision tower (27 layers, 576 M parameters, bf16, gradients
accumulated into fp32 `main_grad`), exact-size buckets, medians. {origin(bench)}

{speed(bench)}

Mixes of images and video replayed from one set of captures. {origin(mixes)}

{parity(mixes)}

Whole optimizer steps of Bridge's `pretrain()`: the full tower and a language model of 4 layers of 2048 with a
vocabulary of 151,936, 1 to 3 photographs of mixed size in each of 4 microbatches, `overlap_grad_reduce` and
`overlap_param_gather` on. Losses and gradient norms: the largest distance to the nearest eager run over the eager runs'
own spread up to that step. {origin(runs)}

{training(runs)}
"""
    notes = (FOLDER / "notes.md").read_text()
    (FOLDER / "README.md").write_text(f"# Measured results\n\n{HEAD}\n\n{body}\n{autoload(loading)}\n{notes}")
    PAGE.write_text(fill(PAGE.read_text(), page_parts(FOLDER)))
    PACKED.write_text(fill(PACKED.read_text(), packed_parts(FOLDER)))
    PARALLEL.write_text(fill(PARALLEL.read_text(), layout_parts(FOLDER)))
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text(), {"results": body.rstrip()}))
