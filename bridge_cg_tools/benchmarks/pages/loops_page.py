"""The tables of docs/other_loops.md, from the records."""

from pathlib import Path
from typing import Any

from bridge_cg_tools.benchmarks.loops.rounds import OLD, REFERENCE, UPDATE
from bridge_cg_tools.benchmarks.pages.markdown import Records, number, table, with_origin
from bridge_cg_tools.benchmarks.records.results import read_records

PASSES = {OLD: "log-probabilities", REFERENCE: "reference", UPDATE: "update"}


def times(records: Records) -> str:
    """Return how long rounds take on graphs and by pass over eager's, and whether they compute the same."""
    rows = [
        [
            r["case"],
            r["mode"],
            len(r["losses"]),
            f"{r['ms'] / r['ratio']:.0f}",
            f"{r['ms']:.0f}",
            f"**{r['ratio']:.2f}**",
        ]
        + [f"{r['pass_ratios'][name]:.2f}" for name in PASSES]
        + [number(r, "encoder_ratio", ".2f"), number(r, "graph_share", ".0%"), _as_eager(r)]
        for r in records
    ]
    header = ["loop", "mode", "rounds", "eager ms", "graphs ms", "ratio", *PASSES.values(), "encoder", "on graphs"]
    return table([*header, "beside eager"], rows)


def _as_eager(record: dict[str, Any]) -> str:
    first = record["log_prob_diff"][0]  # before any update
    bits = "log-probabilities bit-equal" if record["bit_equal"] else f"NOT BIT-EQUAL, by {first:.0e} in the first round"
    if record["bit_equal"] and first:
        bits += f" with as many rows, {first:.0e} from packs without padding"
    if record.get("inside_spread") is None:
        return bits
    return bits + (", losses inside the spread" if record["inside_spread"] else ", OTHER LOSSES")


def switches(records: Records) -> str:
    """Return what happened while weights were away, nothing without such runs."""
    rows = [
        [r["case"], r["switches"], r["moves"], number(r, "graph_share_moved", ".0%"), f"{max(r['recapture_s']):.2f}"]
        + [number(r, "graphs_away_gb", ".2f"), number(r, "growth_gb", ".2f"), "yes" if r["canary_intact"] else "NO"]
        for r in records
        if "switches" in r
    ]
    header = ["loop", "switches", "with other addresses", "least on graphs then", "most s of recordings in a round"]
    columns = [*header, "GiB of graphs that stay", "growth GiB", "others' memory intact"]
    return table(columns, rows) if rows else ""


def loops_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    measured = [
        r for r in read_records(folder / "loops.jsonl") if "pass_ratios" in r and r["mode"].startswith("plugin")
    ]
    if not measured:
        return {"loops": ""}
    tables = [times(measured), switches(measured)]
    return {"loops": with_origin("\n\n".join(filter(None, tables)), measured)}
