"""Train a recipe or preset with graph flags and overrides: `bridge-cg train` in a checkout that is not installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.train import main

if __name__ == "__main__":
    sys.exit(main(script=__file__))
