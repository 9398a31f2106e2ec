"""The tables of docs/other_loops.md, from the records."""

from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.spread import outside_by_others
from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.loops.bench import EAGER
from scripts.performance.loops.records import FEWEST_EAGER_RUNS
from scripts.performance.loops.rounds import OLD, REFERENCE, UPDATE
from scripts.performance.pages.markdown import Records, number, table, with_origin

PASSES = {OLD: "log-probabilities", REFERENCE: "reference", UPDATE: "update"}


def times(records: Records, eager: Records) -> str:
    """Return how long rounds take on graphs and by pass over eager's, and whether they compute the same.

    Args:
        records: Of runs on graphs.
        eager: Of eager runs, of all cases.
    """
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
        + [number(r, "encoder_ratio", ".2f"), _on_graphs(r), _as_eager(r, eager)]
        for r in records
    ]
    header = ["loop", "mode", "rounds", "eager ms", "graphs ms", "ratio", *PASSES.values(), "encoder", "on graphs"]
    return table([*header, "beside eager"], rows)


def _on_graphs(record: dict[str, Any]) -> str:
    """Return the share of microbatches on graphs, and how many among them were not encoded again."""
    share = number(record, "graph_share", ".0%")
    return f"{share}, {record['encoded_before']} encoded before" if "encoded_before" in record else share


def _as_eager(record: dict[str, Any], eager: Records) -> str:
    first = record["log_prob_diff"][0]  # before any update
    bits = "log-probabilities bit-equal" if record["bit_equal"] else f"NOT BIT-EQUAL, by {first:.0e} in the first round"
    if record["bit_equal"] and first:
        bits += f" with as many rows, {first:.0e} from packs without padding"
    if "training_equal" in record:
        return f"{bits}, losses and gradient norms {'bit-equal' if record['training_equal'] else 'NOT BIT-EQUAL'}"
    if record.get("inside_spread") is None:
        return bits
    return f"{bits}, losses inside the spread" if record["inside_spread"] else f"{bits}, {_outside(record, eager)}"


def _outside(record: dict[str, Any], eager: Records) -> str:
    """Return what is said of a run outside the spread: the eager runs are judged by the others in the same way."""
    others = [r for r in eager if r["case"] == record["case"]]
    rounds = min(len(r["losses"]) for r in (record, *others))
    judged = [[r[name][:rounds] for r in others] for name in ("losses", "grad_norms")]
    if len(others) > FEWEST_EAGER_RUNS and (count := outside_by_others(*judged)):
        return f"losses outside the spread, as {count} of {len(others)} eager runs"
    return "OTHER LOSSES"


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
    records = [r for r in read_records(folder / "loops.jsonl") if "passes_ms" in r]
    measured = [r for r in records if r["mode"].startswith("plugin")]
    if not measured:
        return {"loops": ""}
    eager = [r for r in records if r["mode"].startswith(EAGER)]
    tables = [times(measured, eager), switches(measured)]
    return {"loops": with_origin("\n\n".join(filter(None, tables)), measured)}
