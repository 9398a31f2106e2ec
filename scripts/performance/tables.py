"""Write docs/benchmarks/README.md, the README's results, and all tables of docs that come from records.

python scripts/performance/tables.py
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.pages.results_page import write_pages

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    write_pages()
