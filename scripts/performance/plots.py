"""Draw docs/benchmarks/*.svg from the records alone. Needs matplotlib.

python scripts/performance/plots.py
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.pages.plots import FOLDER, draw


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where records are read and plots written")
    for path in draw(parser.parse_args(arguments).folder):
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
