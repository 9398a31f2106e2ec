"""Bridge's `pretrain()` on packed documents: eager several times and on packed-sequence graphs, losses side by side.

python scripts/performance/train_packed.py --steps 50 --out docs/benchmarks/packed_training.jsonl
python scripts/performance/train_packed.py --steps 50 --model qwen3_vl
python scripts/performance/train_packed.py --steps 50 --model mamba --side-by-side
python scripts/performance/train_packed.py --steps 50 --model fp8

Eager does not agree with itself on other numbers of rows, where matrix libraries choose other kernels. So the spread is
that of eager runs whose packs are as they are, twice, and padded to a multiple of 64 and of 256 tokens. Processes
import side by side; the first eager run and the graphs, each alone on the GPU, are timed. With `--side-by-side` all
runs share the GPU and nothing is timed, which takes half as long.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path
from scripts.performance.packed.runs import CASES, compare, train_all


def main() -> int:
    """Train all and compare; non-zero if graphs train another model or nothing was replayed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", choices=CASES, default="dense")
    parser.add_argument("--modules", default="", help="parts of layers to capture; all layers as one region without")
    parser.add_argument("--side-by-side", action="store_true", help="all runs at once; nothing is timed")
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed_training.jsonl if left out")
    args = parser.parse_args()
    out = output_path(args.out, "packed_training.jsonl")
    runs = train_all(args.steps, args.model, args.modules, args.side_by_side)
    return compare(runs, args.steps, out, CASES[args.model])


if __name__ == "__main__":
    sys.exit(main())
