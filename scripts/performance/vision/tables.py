"""The records of bench_vision.py: those that a run replaces, the limit's, and all as lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import (
    provenance,
    put_record,
    read_records,
    write_records,
)
from scripts.performance.models.workloads import Grid, description

WIDTHS, DIGITS = (7, 5, 6, 7, 7), (1, 2, 2, 1, 0)


def drop_records(out: Path, grids: dict[str, Grid], modes: Sequence[str]) -> None:
    """Drop the records that this run is about to write."""
    asked = {(name, mode) for name in grids for mode in modes}
    write_records(out, [r for r in read_records(out) if (r["case"], r["mode"]) not in asked])


def print_table(records: Sequence[dict[str, Any]], grids: dict[str, Grid]) -> None:
    """Print the records of the cases."""
    print(
        f"{'case':13} {'mode':23} {'tokens':>6} {'ms':>7} {'ratio':>5} {'host':>6} {'busy':>7} {'kernels':>7}  parity"
    )
    for r in sorted((r for r in records if r["case"] in grids), key=lambda r: list(grids).index(r["case"])):
        head = f"{r['case']:13} {r['mode']:23} {r['tokens']:>6}"
        if "error" in r:
            print(f"{head} {r['error']}")
            continue
        numbers = [r["ms"], r.get("ratio"), r.get("host_ms"), r.get("gpu_busy_ms"), r.get("kernels")]
        cells = [" " * w if n is None else f"{n:>{w}.{d}f}" for n, w, d in zip(numbers, WIDTHS, DIGITS, strict=True)]
        parity = f"outputs {r['forward_rel']:.0e}, gradients {r['grad_rel']:.1e}" if "forward_rel" in r else ""
        print(f"{head} {' '.join(cells)}  {parity}")


def write_limits(out: Path, grids: dict[str, Grid]) -> None:
    """Write what arithmetic alone takes."""
    from scripts.performance.models.arithmetic import limit_ms, step_flops

    for name, grid in grids.items():
        fields = {"ms": limit_ms(grid), "tflop": step_flops(grid) / 1e12, **provenance(0, 0)}
        put_record(out, {**description(name, "limit", grid), **fields})
