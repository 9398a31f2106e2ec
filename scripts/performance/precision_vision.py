"""How far eager and the plugin's kernels are from fp32: error of outputs and of every parameter's gradient.

    python scripts/performance/precision_vision.py
    python scripts/performance/precision_vision.py --layers 27 --cases 1x448 --repeats 5

The reference is the same tower in plain fp32 PyTorch, from the bf16 weights cast up (`Fp32Tower`). An error is the
relative L2 difference from it, averaged over repeats with other pixels. A record a case and mode goes to --out.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.models.workloads import workloads
from scripts.performance.vision.precision import ALLOWANCE, farther_than_eager, measure, print_record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", default="1x448,4x448,1x768", help="comma-separated cases of the benchmark")
    parser.add_argument("--layers", default="4,27", help="comma-separated numbers of layers")
    parser.add_argument("--repeats", type=int, default=3, help="batches with other pixels, at least 1")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/vision_precision.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write records; status 1 if a mode is farther from fp32 than eager, 2 for a wrong argument."""
    args = parse(arguments)
    try:
        grids = workloads(args.cases.split(","), ())
        layers = [_positive("--layers", word) for word in args.layers.split(",")]
        repeats = _positive("--repeats", args.repeats)
        out = output_path(args.out, "vision_precision.jsonl")
    except ValueError as error:
        print(f"precision_vision.py: {error}", file=sys.stderr)
        return 2
    records = []
    for record in measure(grids, layers, repeats):
        put_record(out, record)
        print_record(record)
        records.append(record)
    farther = farther_than_eager(records)
    print("\n".join(farther) or f"no mode is farther from fp32 than eager by more than {ALLOWANCE - 1:.0%}")
    return 1 if farther else 0


def _positive(flag: str, word: Any) -> int:
    try:
        value = int(word)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"Cannot use {flag} {word}: it must be a whole number from 1 on. Correct it.")
    return value


if __name__ == "__main__":
    sys.exit(main())
