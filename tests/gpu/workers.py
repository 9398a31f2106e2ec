"""What the processes of training runs are told; see `trainings.Training`."""

import argparse
from pathlib import Path


def worker_parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser of what every process is told: how to train, for how many steps, where to write."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--train", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser
