"""Parity of encoders' replays with eager: 20 mixes of each encoder from the same captures, beside fp32.

    python scripts/performance/parity_encoders.py
    python scripts/performance/parity_encoders.py --encoders nemotron_vl --layers 4

Exact kernels. A mix passes where outputs and gradients differ from eager's by no more than their limit, or where both
are as near to fp32 as eager's. Records go to docs/benchmarks/encoders_parity.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_tools.benchmarks.models.encoders import ENCODERS
from bridge_cg_tools.benchmarks.records.results import output_path, put_record
from bridge_cg_tools.benchmarks.vision.encoder_parity import MIXES, MOST_TOKENS, failures, measure, print_record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--encoders", default=",".join(ENCODERS), help=f"comma-separated; all: {', '.join(ENCODERS)}")
    parser.add_argument("--layers", type=int, help="of every encoder; the full size if left out")
    parser.add_argument("--mixes", type=int, default=MIXES, help="of every encoder")
    parser.add_argument("--tokens", type=int, default=MOST_TOKENS, help="of the largest bucket")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/encoders_parity.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 1 if something misses its limit, 2 for a wrong argument."""
    args = parse(arguments)
    try:
        names = [name.strip() for name in args.encoders.split(",")]
        unknown = [name for name in names if name not in ENCODERS]
        if unknown:
            raise ValueError(f"--encoders {unknown[0]}: it must be any of {', '.join(ENCODERS)}; correct the name")
        for flag, value, least in (("layers", args.layers, 2), ("mixes", args.mixes, 1), ("tokens", args.tokens, 64)):
            if value is not None and value < least:
                raise ValueError(f"--{flag} {value}: it must be a whole number from {least} on; correct it")
        out = output_path(args.out, "encoders_parity.jsonl")
    except ValueError as error:
        print(f"parity_encoders.py: {error}", file=sys.stderr)
        return 2
    from bridge_cg_tools.benchmarks.models import tower

    tower.start_process()
    missed, count = [], 0
    for name in names:
        records = []
        try:
            for record in measure(name, ENCODERS[name], args.layers or ENCODERS[name].layers, args.mixes, args.tokens):
                put_record(out, record)
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
