"""What the plugin adds to a process that imports PyTorch and never Bridge: processes with it on and off, in turn.

    python scripts/performance/bench_autoload.py [--repeats 40] [--out docs/benchmarks/autoload.jsonl]

The switch is BRIDGE_CG_PLUGIN; nothing else differs. Importing PyTorch takes more than a second and varies by tens of
milliseconds, so each process also times the step in which PyTorch loads its plugins: the only one that differs.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import write_records
from scripts.performance.measuring.autoload import measure, records


def main() -> int:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "autoload.jsonl")
    args = parser.parse_args()
    made = records(measure(args.repeats))
    write_records(args.out, made)
    for record in made:
        print({key: record[key] for key in ("mode", "ms", "load_ms", "load_cpu_ms", "added_ms") if key in record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
