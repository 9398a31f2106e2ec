"""Parity of replays with eager: many mixes of images and video from the same captures.

    python scripts/performance/parity_vision.py --out docs/benchmarks/vision_parity.jsonl
    python scripts/performance/parity_vision.py --on-demand

Runs itself once more with deterministic algorithms, where gradients must agree to rounding. With --on-demand there are
no captures to begin with: steps run over all mixes, whose buckets are chosen and recorded on the way.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import read_records, write_records
from scripts.performance.vision.parity import failures, measure, without_modes


def main() -> int:
    """Run both modes, write the records, print a table; non-zero when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/vision_parity.jsonl")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--on-demand", action="store_true", help="buckets appear while steps run; keeps other records")
    parser.add_argument("--part", action="store_true", help="measure in this process only and append")
    args = parser.parse_args()
    if args.part:
        write_records(args.out, read_records(args.out) + measure(args.repeats, args.on_demand))
        return 0
    write_records(args.out, without_modes(read_records(args.out), args.on_demand))
    how = ["--on-demand"] if args.on_demand else []
    for extra in ({}, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}):
        command = [sys.executable, __file__, "--part", "--out", str(args.out), "--repeats", str(args.repeats), *how]
        subprocess.run(command, env={**os.environ, **extra}, check=True)
    records = read_records(args.out)
    print(f"{'case':26} {'mode':30} {'tokens':>6} {'bucket':>14} {'forward':>9} {'gradient':>9} {'noise':>9}  fallback")
    for r in records:
        print(
            f"{r['case']:26} {r['mode']:30} {r['tokens']:>6} {r['bucket'] or '-':>14} {r['forward_rel']:>9.1e} "
            f"{r['grad_rel']:>9.1e} {r['grad_noise']:>9.1e}  {r['fallback'] or ''}"
        )
    missed = failures(records)
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
