"""Times of experts' products, forward and both gradients: Transformer Engine's grouped linear layers and the plugin's.

python scripts/performance/bench_experts.py --out docs/benchmarks/experts.jsonl
python scripts/performance/bench_experts.py --tilings

The experts are those of `bench_packed.py`'s mixture. Weight gradients are added to fp32 sums on both sides. With
`--tilings` every tiling of a list is timed for the first layer, too, to choose those in `language/experts/kernels.py`.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.measuring.experts import records, show_tilings


def main() -> int:
    """Measure, write the records, and show the tilings if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/experts.jsonl if left out")
    parser.add_argument("--tilings", action="store_true", help="time tilings, too")
    args = parser.parse_args()
    out = output_path(args.out, "experts.jsonl")
    for record in records():
        put_record(out, record)
    if args.tilings:
        show_tilings()
    return 0


if __name__ == "__main__":
    sys.exit(main())
