"""The kernels of one forward plus backward of the vision tower."""

from collections.abc import Iterator, Sequence
from typing import Any

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.models.workloads import Grid, description

MODES = (
    *("eager", "plugin", "plugin_te_attention"),
    *("plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams"),
)


def profile_cases(grids: dict[str, Grid], modes: Sequence[str], top: int) -> Iterator[dict[str, Any]]:
    """Yield a record of every case and mode."""
    from scripts.performance.models import tower
    from scripts.performance.models.modes import MODES as KINDS

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    kinds = [KINDS[mode]() for mode in modes]
    for name, grid in grids.items():
        batch = tower.make_batch(grid, model)
        for kind in kinds:
            with kind.on(model, grads, batch) as (prepared, _):
                yield profiled(name, kind.name, prepared, batch, top)


def profiled(name: str, mode: str, model: Any, batch: Any, top: int) -> dict[str, Any]:
    """Return the record of one case and mode."""
    from scripts.performance.measuring import measure
    from scripts.performance.models import tower

    times = measure.median_times(lambda between: tower.step(model, batch, between), 5, warmup=2)
    kernels = measure.profile(lambda: tower.step(model, batch))
    return {
        **description(name, mode, batch.rows),
        "ms": times.ms,
        "host_ms": times.host_ms,
        "gpu_busy_ms": kernels.busy_ms,
        "kernels": kernels.count,
        "families": kernels.families(),
        "top": [list(kernel) for kernel in kernels.largest(top)],
        **provenance(times.repeats, 0),
    }


def print_profile(record: dict[str, Any]) -> None:
    """Print a record: its kernels, then its families."""
    print(
        f"\n{record['case']} {record['mode']}: {record['ms']:.2f} ms, host {record['host_ms']:.2f} ms, "
        f"GPU busy {record['gpu_busy_ms']:.2f} ms, {record['kernels']} kernels"
    )
    for name, ms, count in record["top"]:
        print(f"{ms:8.3f} ms {count:5d}  {name[:110]}")
    for name, ms in record["families"].items():
        print(f"{ms:8.3f} ms        {name}")
