"""Parity of encoders' replays with eager: 20 mixes of each encoder from the same captures, beside fp32.

    python scripts/performance/parity_encoders.py
    python scripts/performance/parity_encoders.py --encoders nemotron_vl --layers 4

A mix passes where outputs and gradients differ from eager's by no more than their limit, or where both are as near to
fp32 as eager's. Records go to docs/benchmarks/encoders_parity.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import put_record
from bridge_cg_plugin.graphs.errors import CaptureError
from scripts.performance.models.encoders import ENCODERS
from scripts.performance.vision.encoder_arguments import encoder_parser, layers_of_encoders
from scripts.performance.vision.encoder_parity import MIXES, MOST_TOKENS, failures, measure, print_record
from scripts.performance.vision.encoders import MODES

RECORDS = "encoders_parity.jsonl"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = encoder_parser(__doc__.splitlines()[0], RECORDS)
    parser.add_argument("--mixes", type=int, default=MIXES, help="of every encoder")
    parser.add_argument("--tokens", type=int, default=MOST_TOKENS, help="of the largest bucket")
    parser.add_argument("--mode", default="plugin", choices=tuple(MODES), help="exact kernels if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 1 if something misses its limit, 2 for a wrong argument."""
    args = parse(arguments)
    try:
        depths = layers_of_encoders(args, RECORDS, {"mixes": 1, "tokens": 64})
    except ValueError as error:
        print(f"parity_encoders.py: {error}", file=sys.stderr)
        return 2
    from scripts.performance.models import tower

    tower.start_process()
    missed, count = [], 0
    for name, layers in depths.items():
        records = []
        try:
            for record in measure(name, ENCODERS[name], layers, args.mixes, args.tokens, args.mode):
                put_record(args.out, record)
                print_record(record)
                records.append(record)
        except CaptureError as error:
            missed.append(f"{name}: {error}")
        missed += failures(records)
        count += len(records)
    print("\n".join(missed) or f"all {count} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
