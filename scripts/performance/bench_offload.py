"""Memory against time of graphs whose activations are offloaded, recomputed, or both as a memory target asks.

    python scripts/performance/bench_offload.py
    python scripts/performance/bench_offload.py --cases 1x2048 --targets 0.5,0.4,0.3
    python scripts/performance/bench_offload.py --slots 1
    python scripts/performance/bench_offload.py --cases tokens_8192 --modules attn --targets 0.6
    python scripts/performance/bench_offload.py --cases experts_8192 --modules attn,moe_router --rounds 3

Every mode replays the same batches on the same weights as `none`, the graph that keeps all activations. A case with
several slots runs as many forwards and then their backwards, as a pipeline's first stage does. `experts_8192` is a pack
through a mixture of experts of 16 layers, experts included; the other cases are images through the vision tower. Where
experts run eager, the host decides: `--rounds` lets modes take turns, so that a slow moment of it is not one mode's.
Records go to docs/benchmarks/offload.jsonl; a mode that fails has a record with the error.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.models.workloads import Grid, workloads
from scripts.performance.offload.bench import PACKS, SLOTS, Bench
from scripts.performance.offload.replays import FIXED, summary

TARGETS = "0.6,0.4,0.3,0.25"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/offload.jsonl on a GPU")
    parser.add_argument("--cases", default=",".join(SLOTS), help=f"comma-separated; all: {', '.join(SLOTS)}")
    parser.add_argument("--modes", default=",".join(FIXED), help=f"beside targets; all: {', '.join(FIXED)}")
    parser.add_argument("--targets", default=TARGETS, help="memory targets of modes mixed_N, parts of none's memory")
    parser.add_argument("--slots", type=int, help="microbatches in flight; the case's own by default")
    parser.add_argument("--modules", default="", help="parts of layers on graphs; the whole model without")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each mode, at least 3")
    parser.add_argument("--rounds", type=int, default=1, help="turns of all modes; the fastest of each counts")
    parser.add_argument("--seconds", type=float, default=300.0, help="no further mode begins after this long")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the records."""
    args = parse(arguments)
    try:
        cases, modes, targets, out = checked(args)
    except ValueError as error:
        print(f"bench_offload.py: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    bench = Bench(args.repeats, [module for module in args.modules.split(",") if module])
    for name, grid in cases.items():
        case = bench.case(name, grid, args.slots or SLOTS.get(name, 1))
        for record in case.records(modes, targets, deadline, args.rounds):
            put_record(out, record)
            print(summary(record), flush=True)
    return 0


def checked(args: argparse.Namespace) -> tuple[dict[str, Grid | None], list[str], list[float], Path]:
    """Return cases, modes, targets and file.

    Raises:
        ValueError: A name is unknown, or a number out of range.
    """
    modes = [mode for mode in args.modes.split(",") if mode]
    unknown = [mode for mode in modes if mode not in FIXED]
    if unknown or "none" not in modes:
        raise ValueError(
            f"Cannot use --modes {args.modes}: it must be none or any of {', '.join(FIXED)}. Correct the list."
        )
    targets = [float(part) for part in args.targets.split(",") if part]
    if not all(0 < target < 1 for target in targets):
        raise ValueError(f"Cannot use --targets {args.targets}: it must be numbers between 0 and 1. Correct the list.")
    for name in ("slots", "rounds"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"Cannot use --{name} {value}: it must be a whole number of at least 1. Correct it.")
    packs = [name for name in args.cases.split(",") if name in PACKS]
    names = [name for name in args.cases.split(",") if name not in PACKS]
    counts = [int(name.removeprefix("tokens_")) for name in names if name.startswith("tokens_")]
    images = workloads([name for name in names if not name.startswith("tokens_")], counts)
    cases = {**images, **dict.fromkeys(packs)}
    return cases, modes, targets, output_path(args.out, "offload.jsonl")


if __name__ == "__main__":
    sys.exit(main())
