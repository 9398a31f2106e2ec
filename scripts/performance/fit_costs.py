"""Fit the cost models of `bridge-cg plan` and `bridge-cg explain` to the records, and write them into the package.

python scripts/performance/fit_costs.py

Takes a few seconds and no GPU. A test fails until the package has what the records give.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.planner.rates import FILE
from scripts.performance.pages.cost_page import fitted


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=ROOT / "docs/benchmarks", help="folder of the records")
    parser.add_argument("--out", type=Path, default=FILE, help="where to write")
    args = parser.parse_args()
    args.out.write_text(fitted(args.records))


if __name__ == "__main__":
    main()
