"""The tables and pictures of docs/performance.md, from the records."""

from pathlib import Path

from bridge_cg_plugin.attention_bounds import SIDE_STREAM_UP_TO
from bridge_cg_plugin.cli.runs.results import loss_distance, read_records, same_steps
from scripts.performance.models.workloads import CASES
from scripts.performance.pages.markdown import Records, by_case, number, picture, table, with_origin

# The cases of the benchmarks, for a reader who has not seen the code.
IMAGES = {
    "1x448": "1 of 448 x 448",
    "1x768": "1 of 768 x 768",
    "4x448": "4 of 448 x 448",
    "8mix": "8 of mixed size",
    "video16": "16 frames of 320 x 320",
    "1x2048": "1 of 2048 x 2048",
}


def by_default(records: Records) -> Records:
    """Return the records with default options: fast kernels, on two streams where "auto" has two."""
    fast, streams = by_case(records, "plugin_fast"), by_case(records, "plugin_streams")
    return [
        streams[case] if case in streams and fast[case]["tokens"] <= SIDE_STREAM_UP_TO else fast[case]
        for case in CASES
        if case in fast
    ]


def gains(records: Records) -> str:
    """Return eager and default options beside the arithmetic limit, for each case, with their origin."""
    eager, limit = by_case(records, "eager"), by_case(records, "limit")
    shown = [r for r in by_default(records) if r["case"] in eager]
    rows = []
    for r in shown:
        least = limit.get(r["case"])
        over = f"{r['ms'] / least['ms']:.1f}" if least else ""
        rows.append(
            [IMAGES[r["case"]], r["tokens"], number(eager[r["case"]], "ms"), number(r, "ms")]
            + [f"**{eager[r['case']]['ms'] / r['ms']:.1f}**", number(least, "ms"), over]
        )
    header = ["images", "tokens", "eager ms", "graphs ms", "speedup", "limit ms", "graphs over limit"]
    return with_origin(table(header, rows), [*shown, *(eager[r["case"]] for r in shown)]) if rows else ""


def training(records: Records) -> str:
    """Return whole optimizer steps, eager and on graphs, with their origin."""
    eager = by_case(records, "eager")
    shown = [r for r in by_case(records, "plugin").values() if r["case"] in eager]
    rows = []
    for r in shown:
        base = eager[r["case"]]
        images, _, model = r["case"].partition("_")
        rows.append(
            [images, model, number(base, "ms", ".0f"), number(r, "ms", ".0f"), f"**{base['ms'] / r['ms']:.1f}**"]
            + (
                [f"{loss_distance(r['losses'], base['losses']):.0e}"]
                if same_steps((r["losses"], base["losses"]))
                else [""]
            )
        )
    header = ["images", "language model", "eager ms", "graphs ms", "speedup", "losses differ by"]
    return with_origin(table(header, rows), [*shown, *(eager[r["case"]] for r in shown)]) if rows else ""


def performance_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    bench, steps = (read_records(folder / f"{name}.jsonl") for name in ("vision_bench", "steps"))
    return {
        "gains": gains(bench),
        "time": picture(
            folder, "time.svg", "time against tokens: eager, upstream's graphs, and the plugin", "benchmarks/"
        ),
        "training": training(steps),
        "steps-plot": picture(folder, "steps.svg", "optimizer steps of pretrain()", "benchmarks/"),
        "limit": picture(folder, "limit.svg", "share of the arithmetic limit against tokens", "benchmarks/"),
    }
