"""Whole optimizer steps of Bridge's `pretrain()`: image mixes x language models x eager, upstream's graphs, the plugin.

    python scripts/performance/bench_step.py
    python scripts/performance/bench_step.py --images mixed --language-models 16x2048 --modes eager,plugin --seconds 200

Trains examples/photographs, each run in a process of its own, with 4 microbatches a step. While steps of one run are
timed the next ones import; where memory allows, they are set up and warm up before and after. A record is written after
each run and replaces an older one of its case and mode; a run that fails has a record with the error.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record, read_records
from scripts.performance.photographs.comparison import SKIPPED
from scripts.performance.photographs.steps import (
    IMAGES,
    LANGUAGE_MODELS,
    MODES,
    Bench,
    Case,
    eager_of,
    record_of,
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/steps.jsonl on a GPU")
    parser.add_argument("--images", default=",".join(IMAGES), help=f"comma-separated; all: {', '.join(IMAGES)}")
    parser.add_argument("--language-models", default=",".join(LANGUAGE_MODELS), help="comma-separated LAYERSxWIDTH")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=14, help=f"optimizer steps; the first {SKIPPED} do not count")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run begins after this long")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs and write the records."""
    args = parse(arguments)
    try:
        runs = cases(args)
        out = output_path(args.out, "steps.jsonl")
    except ValueError as error:
        print(f"bench_step.py: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as pool:
        bench = Bench(Path(folder), args.steps, time.monotonic() + args.seconds)
        trained = [pool.submit(bench.train, turn, case) for turn, case in enumerate(runs)]
        for case, future in zip(runs, trained, strict=True):
            record = record_of(case, future.result(), args.steps, eager_of(case, read_records(out)))
            put_record(out, record)
            print(f"{case.name} {case.mode}: {record.get('error') or format(record['ms'], '.1f') + ' ms'}", flush=True)
    return 0


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the runs that the command line asks for, eager ones of a case first.

    Raises:
        ValueError: A name is unknown, or there are too few steps.
    """
    if args.steps <= SKIPPED:
        raise ValueError(
            f"Cannot use --steps {args.steps}: it must be more than {SKIPPED}, which do not count. Take 14."
        )
    chosen = {}
    for option, allowed in (("images", IMAGES), ("modes", MODES)):
        names = [name for name in getattr(args, option).split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise ValueError(
                f"Cannot use --{option} {','.join(unknown)}: it must be any of {', '.join(allowed)}. Correct the name."
            )
        chosen[option] = names
    models = args.language_models.split(",")
    for model in models:
        if not re.fullmatch(r"[1-9]\d*x(2048|2560)", model):
            raise ValueError(
                f"Cannot use --language-models {model}: it must be LAYERSxWIDTH, width 2048 or 2560. Write 4x2048, say."
            )
    modes = [mode for mode in MODES if mode in chosen["modes"]]
    return [Case(images, model, mode) for model in models for images in chosen["images"] for mode in modes]


if __name__ == "__main__":
    sys.exit(main())
