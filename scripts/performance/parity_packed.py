"""Parity of graphs of packed documents with eager: 30 packs from one capture, documents apart, fallbacks.

python scripts/performance/parity_packed.py --out docs/benchmarks/packed_parity.jsonl

A dense model of 4 layers. Under deterministic algorithms graphs must give what eager gives on the bucket's rows to the
bit, with either rotary kernel; with the default ones they must stay within what eager differs from itself. Where eager
on a pack's own rows rounds otherwise, the distance of both from fp32 is measured.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.models import tower
from scripts.performance.packed import parity as parity
from scripts.performance.packed.comparison import Comparison, misses


def main() -> int:
    """Measure, write the records, and say what misses its limit; non-zero if something does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed_parity.jsonl if left out")
    out = output_path(parser.parse_args().out, "packed_parity.jsonl")
    tower.start_process()
    records = []
    for name, fused, deterministic in (("rope", False, True), ("fused_rope", True, True), ("default", False, False)):
        for record in Comparison(name, fused, deterministic).records():
            put_record(out, record)
            records.append(record)
    missed = misses(records)
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
