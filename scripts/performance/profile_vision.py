"""Where the GPU time of one forward plus backward goes: kernels by total time, and families of kernels.

    python scripts/performance/profile_vision.py --cases 1x768 --top 25
    python scripts/performance/profile_vision.py --modes eager,plugin,plugin_fast,plugin_flash --records

With --records, one record a case and mode goes to docs/benchmarks/vision_profile.jsonl, which plots.py draws.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import output_path, provenance, put_record  # noqa: E402
from scripts.performance.workloads import CASES, Grid, description, workloads  # noqa: E402

MODES = (
    *("eager", "plugin", "plugin_te_attention"),
    *("plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--top", type=int, default=25, help="kernels that are listed")
    parser.add_argument("--records", action="store_true", help="write records")
    parser.add_argument("--out", type=Path, help="their file; docs/benchmarks/vision_profile.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write records."""
    args = parse(arguments)
    try:
        grids = workloads(args.cases.split(","), ())
        unknown = [mode for mode in args.modes.split(",") if mode not in MODES]
        if unknown:
            raise ValueError(f"--modes {unknown[0]}: allowed is any of {', '.join(MODES)}; correct the name")
        out = output_path(args.out, "vision_profile.jsonl") if args.records else None
    except ValueError as error:
        print(f"profile_vision.py: {error}", file=sys.stderr)
        return 2
    for record in profile_cases(grids, args.modes.split(","), args.top):
        print_profile(record)
        if out is not None:
            put_record(out, record)
    return 0


def profile_cases(grids: dict[str, Grid], modes: Sequence[str], top: int):
    """Yield a record of every case and mode."""
    from scripts.performance import tower
    from scripts.performance.modes import MODES as KINDS

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
    from scripts.performance import measure, tower

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


if __name__ == "__main__":
    sys.exit(main())
