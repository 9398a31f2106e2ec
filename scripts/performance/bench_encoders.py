"""Times of the encoders beside Qwen3-VL's, forward plus backward: eager and the plugin, with parity beside every time.

    python scripts/performance/bench_encoders.py
    python scripts/performance/bench_encoders.py --encoders siglip --layers 4

Gradients are accumulated into fp32 `main_grad`; buckets are of exactly a case's size. Kernels round as eager's do, and
again as by default ("plugin_fast") where that differs. Records go to docs/benchmarks/encoders.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_tools.benchmarks.models.encoders import ENCODERS
from bridge_cg_tools.benchmarks.records.results import output_path, put_record
from bridge_cg_tools.benchmarks.vision.encoders import measure, print_record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--encoders", default=",".join(ENCODERS), help=f"comma-separated; all: {', '.join(ENCODERS)}")
    parser.add_argument("--layers", type=int, help="of every encoder; the full size if left out")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each measurement, at least 3")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/encoders.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 2 for a wrong argument."""
    args = parse(arguments)
    try:
        names = [name.strip() for name in args.encoders.split(",")]
        unknown = [name for name in names if name not in ENCODERS]
        if unknown:
            raise ValueError(f"--encoders {unknown[0]}: it must be any of {', '.join(ENCODERS)}; correct the name")
        if args.layers is not None and args.layers < 2:
            raise ValueError(f"--layers {args.layers}: it must be a whole number from 2 on; correct it")
        out = output_path(args.out, "encoders.jsonl")
    except ValueError as error:
        print(f"bench_encoders.py: {error}", file=sys.stderr)
        return 2
    from bridge_cg_tools.benchmarks.models import tower

    tower.start_process()
    for name in names:
        for record in measure(name, ENCODERS[name], args.layers or ENCODERS[name].layers, args.repeats):
            put_record(out, record)
            print_record(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
