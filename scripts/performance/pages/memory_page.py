"""The tables of docs/benchmarks/memory.md, from the records."""

from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.pages.markdown import Records, code, number, picture, table, with_origin


def memory(records: Records) -> str:
    """Return memory against time of graphs that offload or recompute activations."""
    rows = []
    for r in records:
        head = [f"{r['case']}, {r['slots']} slots" if r["slots"] > 1 else r["case"], r["mode"].replace("_", " ")]
        if "error" in r:
            rows.append([*head, *[""] * 6, code(r["error"])])
            continue
        rows.append(
            [*head, number(r, "memory_gb"), f"**{number(r, 'memory_ratio', '.0%')}**", _time(r)]
            + [f"**{number(r, 'ratio', '.3f')}**", number(r, "pinned_gb"), _copies(r)]
            + ["yes" if r["bit_equal"] else "NO"]
        )
    header = ["case", "mode", "device GiB", "share of none", "ms (GPU busy)", "over none", "host GiB"]
    return table([*header, "copies ms (overlapped)", "outputs bit-equal"], rows) if rows else ""


def _time(record: dict[str, Any]) -> str:
    """Return the time of a step and, in brackets, for how much of it the GPU worked."""
    return f"{record['ms']:.1f} ({record['gpu_busy_ms']:.1f})" if "gpu_busy_ms" in record else number(record, "ms")


def _copies(record: dict[str, Any]) -> str:
    """Return the time of copies and, in brackets, the share of it in which a kernel ran."""
    return f"{record['copy_ms']:.0f} ({record['copy_overlap']:.0%})" if "copy_ms" in record else ""


def limited(records: Records) -> str:
    """Return training runs under a limit of device memory."""
    rows = []
    for r in (r for r in records if r["case"] == "limit"):
        head = [r["mode"].replace("_", " "), number(r, "limit_gb")]
        if "error" in r:
            rows.append([*head, *[""] * 6, code(r["error"].partition(". ")[0])])
            continue
        losses = f"{r['losses'][0]:.4f} to {r['losses'][-1]:.4f}"
        rows.append(
            [*head, number(r, "peak_gb"), number(r, "pinned_gb"), number(r, "ms"), number(r, "ratio", ".2f")]
            + [losses, f"{r['loss_rel']:.1e}", ""]
        )
    header = ["run", "limit GiB", "peak GiB", "host GiB", "ms of a step", "over recompute", "loss"]
    return table([*header, "losses differ by", "error"], rows) if rows else ""


def flat(records: Records) -> str:
    """Return memory over many steps with offloading."""
    looks = {step: look for r in records if r["case"] == "flat" for step, look in r["memory_steps"].items()}
    names = ("allocated_gb", "reserved_gb", "pinned_gb", "resident_gb")
    rows = [[step, *(f"{look[name]:.4f}" for name in names)] for step, look in looks.items()]
    header = ["after step", "device allocated GiB", "device reserved GiB", "page-locked GiB", "process resident GiB"]
    return table(header, rows) if rows else ""


def memory_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records and the plots.
    """
    moved, trained = (read_records(folder / f"{name}.jsonl") for name in ("offload", "offload_training"))
    return {
        "memory": with_origin(memory(moved), moved),
        "memory-plot": picture(folder, "memory.svg", "device memory against time, offload and recompute"),
        "memory-limit": with_origin(limited(trained), trained),
        "memory-flat": flat(trained),
    }
