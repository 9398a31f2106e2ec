"""Times of the encoders beside Qwen3-VL's, forward plus backward: eager and the plugin, with parity beside every time.

    python scripts/performance/bench_encoders.py
    python scripts/performance/bench_encoders.py --encoders siglip --layers 4
    python scripts/performance/bench_encoders.py --cases 1x8192 --modes plugin_fast,plugin_own_attention

Gradients are accumulated into fp32 `main_grad`; buckets are of exactly a case's size. Kernels round as eager's do, and
again as by default ("plugin_fast") where that differs. Records go to docs/benchmarks/encoders.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import put_record
from scripts.performance.vision.encoder_arguments import (
    WAYS,
    encoder_parser,
    layers_of_encoders,
    modes_of,
    with_cases,
)
from scripts.performance.vision.encoders import measure, print_record

RECORDS = "encoders.jsonl"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = encoder_parser(__doc__.splitlines()[0], RECORDS)
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each measurement, at least 3")
    parser.add_argument("--modes", help=f"comma-separated; each encoder's own if left out. All: {WAYS}")
    parser.add_argument("--cases", help="comma-separated sizes; all of each encoder if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 2 for a wrong argument."""
    args = parse(arguments)
    try:
        depths = layers_of_encoders(args, RECORDS)
        modes = None if args.modes is None else modes_of(args.modes)
        encoders = with_cases(depths, args.cases)
    except ValueError as error:
        print(f"bench_encoders.py: {error}", file=sys.stderr)
        return 2
    from scripts.performance.models import tower

    tower.start_process()
    for name, layers in depths.items():
        for record in measure(name, encoders[name], layers, args.repeats, modes):
            put_record(args.out, record)
            print_record(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
