"""Times of the vision tower, forward plus backward: eager, the plugin, upstream's graphs, torch.compile, the limit.

    python scripts/performance/bench_vision.py
    python scripts/performance/bench_vision.py --tokens "" --seconds 90
    python scripts/performance/bench_vision.py --modes eager,plugin --cases 1x448,8mix --tokens 1024,4096

Modes of one group run in one process on the same weights and inputs, one case after another, beside an eager baseline;
each group has a process of its own, as a failed capture or a compilation must not reach another's figures. All
processes start at once and import; they measure in turn. A record is written as soon as it is measured and replaces an
older one of its case and mode. What cannot be measured, for lack of memory, time or support, has a record with the
error.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import (
    output_path,
    read_records,
)
from scripts.performance.models.workloads import CASES, SWEEP, Grid, workloads
from scripts.performance.vision.tables import drop_records, print_table, write_limits
from scripts.performance.vision.task import Task
from scripts.performance.vision.workers import GROUPS, MODES, run_groups, worker


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_bench.jsonl on a GPU")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--tokens", default=",".join(map(str, SWEEP)), help="single images of so many patches")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each measurement, at least 3")
    parser.add_argument("--case-seconds", type=float, default=1.0, help="no further repeat begins after this long")
    parser.add_argument("--seconds", type=float, default=200.0, help="time for all, shared by the processes in turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def split(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the records."""
    args = parse(arguments)
    if args.worker:
        return worker()
    try:
        modes, grids, out = checked(args)
    except ValueError as error:
        print(f"bench_vision.py: {error}", file=sys.stderr)
        return 2
    drop_records(out, grids, modes)
    if "limit" in modes:
        write_limits(out, grids)
    groups = [tuple(mode for mode in group if mode in modes) for group in GROUPS]
    task = Task((), grids, str(out), args.repeats, args.case_seconds, args.seconds)
    run_groups([group for group in groups if group], task)
    print_table(read_records(out), grids)
    return 0


def checked(args: argparse.Namespace) -> tuple[list[str], dict[str, Grid], Path]:
    """Return modes, cases and file.

    Raises:
        ValueError: A name is unknown, a number is no power of two, or a file is needed.
    """
    modes = split(args.modes)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"Cannot use --modes {unknown[0]}: it must be any of {', '.join(MODES)}. Correct the name.")
    try:
        tokens = [int(part) for part in split(args.tokens)]
    except ValueError:
        raise ValueError(
            f"Cannot use --tokens {args.tokens}: it must be numbers, comma-separated. Correct the list."
        ) from None
    grids = workloads(split(args.cases), tokens)
    if not grids:
        raise ValueError("Cannot measure anything: --cases and --tokens are both empty. Name at least one.")
    return modes, grids, output_path(args.out, "vision_bench.jsonl")


if __name__ == "__main__":
    sys.exit(main())
